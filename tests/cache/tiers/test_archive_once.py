"""When KV of sessions without a name is written: at once where somebody has gone on from it, else when nobody waits."""

from __future__ import annotations

import time
from array import array
from pathlib import Path

import pytest
from engine_kit import Kit
from tiny_models import greedy

from cache.tier import StopKind, Tier

FIRST = list(range(20, 60))
OTHER = list(range(100, 140))


def step_slowly(kit: Kit) -> None:
    """A step and a pause, so that turns of 400 tokens outlast the half second of each test on any machine."""
    kit.step()
    time.sleep(0.002)


def under_load(kit: Kit, prompt: list[int], count: int = 4) -> list[int]:
    """One turn beside another that goes on after it, for longer than any pause that counts as quiet; its tokens."""
    busy = kit.send(OTHER, 400, tenant="b")
    kit.step()
    turn = kit.send(prompt, count)
    until = time.monotonic() + 0.5
    while not kit.outcomes[turn].finish_reason or time.monotonic() < until:
        step_slowly(kit)
    assert not kit.outcomes[busy].finish_reason, "the load has ended too early"
    kit.cancel(busy)
    assert kit.outcomes[turn].tokens == greedy(kit.model, prompt, count, kit.outcomes[turn].tokens)
    return kit.outcomes[turn].tokens


def test_under_load_only_what_was_continued_is_written(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path, pages=256, context=2048)
    said = under_load(kit, FIRST)
    assert kit.archive.write_behind.saves == 0
    assert kit.archive.write_behind.pending == 2, "it waits, and so does what ran beside it"
    under_load(kit, [*FIRST, *said, *range(60, 70)])
    assert kit.archive.write_behind.saves == 1
    kit.leave()


@pytest.mark.parametrize(("minutes", "side", "saves"), [(1.9, False, 0), (2.1, False, 1), (2.1, True, 0)])
def test_under_load_an_answer_goes_down_to_disk_after_two_minutes_and_a_side_call_does_not(
    tmp_path: Path, minutes: float, side: bool, saves: int
) -> None:
    kit = Kit(folder=tmp_path, pages=256, context=2048)
    now = 1000.0
    kit.store.retention.clock = lambda: now
    busy = kit.send(OTHER, 400, tenant="b")
    turn = kit.send(FIRST, 4, side=side)
    while not kit.outcomes[turn].finish_reason:
        kit.step()
    now += 60.0 * minutes
    until = time.monotonic() + 0.5
    while time.monotonic() < until and not kit.archive.write_behind.saves:
        step_slowly(kit)
    assert not kit.outcomes[busy].finish_reason, "the load has ended too early"
    assert kit.archive.write_behind.saves == saves
    line = kit.store.nearest("a", array("i", FIRST))
    assert line is not None
    assert line.warm, "it stays on the device while there is room"
    kit.cancel(busy)
    kit.leave()


def test_under_load_nothing_goes_down_of_a_tenant_whose_conversations_do_not_go_on(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path, pages=256, context=2048)
    now = 1000.0
    retention = kit.store.retention
    retention.clock = lambda: now
    for _ in range(300):
        stop = retention.stop("a", StopKind.ANSWER)
        now += 86_400.0
        retention.lose(stop)
    busy = kit.send(OTHER, 400, tenant="b")
    turn = kit.send(FIRST, 4)
    while not kit.outcomes[turn].finish_reason:
        kit.step()
    now += 3600.0
    kit.step(20)
    assert (kit.archive.write_behind.pending, kit.archive.write_behind.saves) == (1, 0)
    kit.cancel(busy)
    kit.leave()


def test_once_nothing_runs_all_is_written(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path, pages=256, context=2048)
    under_load(kit, FIRST)
    kit.run()
    kit.settle()
    assert not kit.archive.write_behind.pending
    kit.leave()


def test_what_still_waits_at_the_end_is_there_after_a_restart(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path, pages=256, context=2048)
    said = under_load(kit, FIRST)
    kit.run()
    kit.leave()
    again = Kit(folder=tmp_path, pages=256, context=2048)
    outcome = again.ask([*FIRST, *said, *range(60, 70)], 4)
    assert outcome.receipt.count_reused(Tier.DISK) > len(FIRST) - 1
    again.leave()
