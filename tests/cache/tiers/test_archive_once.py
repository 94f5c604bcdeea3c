"""When KV of sessions without a name is written: at once where somebody has gone on from it, else when nobody waits."""

from __future__ import annotations

import time
from pathlib import Path

from engine_kit import Kit
from tiny_models import greedy

from cache.tier import Tier

FIRST = list(range(20, 60))
OTHER = list(range(100, 140))


def under_load(kit: Kit, prompt: list[int], count: int = 4) -> list[int]:
    """One turn beside another that goes on after it, for longer than any pause that counts as quiet; its tokens."""
    busy = kit.send(OTHER, 400, tenant="b")
    kit.step()
    turn = kit.send(prompt, count)
    until = time.monotonic() + 0.5
    while not kit.outcomes[turn].finish_reason or time.monotonic() < until:
        kit.step()
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
    assert outcome.receipt is not None
    assert outcome.receipt.reused(Tier.DISK) > len(FIRST) - 1
    again.leave()
