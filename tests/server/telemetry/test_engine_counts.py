"""Sums over the engines that a model has had."""

from cache.tier import Tier, TierStats
from scheduler.engine_stats import Stats
from server.telemetry.engine_counts import EngineCounts


def told(pid: int, steps: int, drafted: int, evicted: int) -> Stats:
    """The statistics of one engine."""
    tiers = {Tier.DEVICE: TierStats(evictions=evicted)}
    return Stats(pid, steps=steps, drafted={"history": drafted}, tiers=tiers, encoder_seconds=steps / 2)


def test_counts_of_engines_add_up_and_only_a_successor_is_a_replacement() -> None:
    counts = EngineCounts()
    assert [counts.update(told(1, 3, 2, 1)), counts.update(told(1, 5, 4, 1))] == [False, False]
    assert [counts.update(Stats()), counts.update(told(2, 1, 1, 2))] == [False, True]
    assert (counts.total("steps"), counts.total("encoder_seconds")) == (6, 3.0)
    assert (counts.total_of("drafted", "history"), counts.total_of("drafted", "grammar")) == (5, 0)
    assert (counts.evictions(Tier.DEVICE), counts.evictions(Tier.DISK)) == (3, 0)


def test_an_engine_after_an_unload_replaces_none() -> None:
    counts = EngineCounts()
    counts.update(told(1, 3, 0, 0))
    counts.unload()
    assert not counts.update(told(2, 4, 0, 0))
    assert counts.total("steps") == 7
