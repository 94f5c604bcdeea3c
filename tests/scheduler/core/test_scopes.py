"""Salts part a tenant's cached tokens, and a turn may pin what it runs on: named or not, in memory and on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_kit import Kit, Outcome

TALK = list(range(20, 60))


def cached(outcome: Outcome) -> int:
    return outcome.receipt.cached


def settle(kit: Kit) -> None:
    """Until everything is written, what was asked but once too: as when nobody has come for a while."""
    kit.step()
    kit.settle()


def stored(kit: Kit) -> list[int]:
    """What tells the stored timelines of these tests apart: their first tokens."""
    return [head.tip.timeline()[0][0] for head in kit.archive.disk.heads.values()]


def test_tokens_are_reused_under_the_same_salt_only(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path)
    first = kit.ask(TALK, 6, salt="x")
    longer = [*TALK, *first.tokens, 1]
    assert cached(kit.ask(longer, 6)) == 0
    assert cached(kit.ask(longer, 6, salt="y")) == 0
    assert cached(kit.ask(longer, 6, salt="x")) >= len(TALK)
    assert cached(kit.ask(longer, 6, salt="x", tenant="b")) == 0
    kit.leave()
    fresh = Kit(folder=tmp_path)
    assert cached(fresh.ask([*TALK, 2], 1, salt="z")) == 0
    assert cached(fresh.ask([*TALK, 2], 1, salt="y")) >= len(TALK)


def test_a_session_has_no_salt() -> None:
    kit = Kit()
    with pytest.raises(ValueError, match="invalid_prompt"):
        kit.send(TALK, 1, session="s", salt="x")
    kit.ask(TALK, 1, session="s")


def test_who_waits_for_a_prefix_waits_for_one_that_it_may_reuse() -> None:
    kit = Kit(step_tokens=256)
    turns = [kit.send(TALK, 1, salt=salt) for salt in ("x", "y", "x")]
    kit.step()
    assert [kit.outcomes[turn].admitted for turn in turns] == [True, True, False]
    kit.run()
    assert [cached(kit.outcomes[turn]) > 0 for turn in turns] == [False, False, True]


def test_salts_are_accounted_to_their_tenant(tmp_path: Path) -> None:
    probe = Kit(folder=tmp_path / "probe")
    probe.ask(TALK, 1, session="s")
    probe.settle()
    kit = Kit(folder=tmp_path / "kv", disk_space=int(probe.archive.disk.space.used * 4.5), share=0.5)
    kit.ask([9, *TALK[1:]], 1, tenant="b")
    settle(kit)
    for number in range(6):
        kit.ask([number, *TALK[1:]], 1, salt=f"s{number}")
        settle(kit)
    assert stored(kit) == [9, 3, 4, 5]


def test_a_turn_pins_what_it_runs_on(tmp_path: Path) -> None:
    probe = Kit(folder=tmp_path / "probe")
    probe.ask(TALK, 1, session="s")
    probe.settle()
    kit = Kit(folder=tmp_path / "kv", disk_space=int(probe.archive.disk.space.used * 3.5))
    kit.ask(TALK, 1, keep_until=1e12)
    kit.ask([9, *TALK[1:]], 1, session="n", keep_until=1e12)
    kit.ask([9, *TALK[1:]], 1, session="n")  # does not end the pin
    for number in range(4):
        settle(kit)
        kit.ask([number, *TALK[1:]], 1)
    settle(kit)
    assert stored(kit) == [20, 9, 3]


def test_a_pinned_timeline_stays_in_memory_while_it_is_continued() -> None:
    kit = Kit(pages=33)
    first = kit.ask(TALK, 4, keep_until=1e12)
    second = kit.ask([*TALK, *first.tokens, 1], 4)
    for number in range(5):
        kit.ask([number, *TALK[1:]], 4)
    assert cached(kit.ask([*TALK, *first.tokens, 1, *second.tokens, 2], 1)) >= len(TALK) + 4


def test_a_salt_that_nothing_is_kept_of_leaves_nothing_behind(tmp_path: Path) -> None:
    probe = Kit(folder=tmp_path / "probe")
    probe.ask(TALK, 1, session="s")
    probe.settle()
    kit = Kit(pages=25, folder=tmp_path / "kv", disk_space=int(probe.archive.disk.space.used * 2.5))
    for number in range(6):
        kit.ask(TALK, 1, salt=f"s{number}")
        kit.settle()
    assert len(kit.store.index) == len(kit.store.residency) < 4
    assert len(kit.archive.disk._index) == len(kit.archive.disk.heads) < 4


def test_a_name_does_not_end_the_pin_of_what_it_takes_over() -> None:
    kit = Kit(pages=33)
    kit.ask([1, 2], 1, session="n")
    first = kit.ask(TALK, 4, keep_until=1e12)
    kit.ask([*TALK, *first.tokens, 1], 1, session="n")
    for number in range(5):
        kit.ask([number, *TALK[1:]], 4)
    assert cached(kit.ask([*TALK, *first.tokens, 2], 1, session="n")) >= len(TALK)
