"""Pinned sessions come back to the device when there is room again."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_kit import Kit

from cache.segments.chain import Owner
from cache.tier import Tier
from scheduler.core.pinned_sessions import PinnedSessions
from scheduler.protocol import AwaitTools

PINNED = list(range(16))
OTHERS = [list(range(40 * n, 40 * n + 16)) for n in range(1, 5)]
FOREVER = 5e9


def still(kit: Kit) -> Kit:
    """Time stands still in it, so that nobody looks by itself."""
    kit.store.retention.clock = lambda: 1000.0
    return kit


def look(kit: Kit, times: int = 3) -> None:
    """Look so often, and let loads end between."""
    for _ in range(times):
        kit.scheduler.pinned._look_at = 0.0
        kit.step()
        if kit.store.archive is not None:
            kit.settle()


def crowd(kit: Kit) -> None:
    """Turns that run at once and need the whole device."""
    for number, prompt in enumerate(OTHERS[:3]):
        kit.send(prompt, 4, session=f"other-{number}")
    kit.run()


def reused(kit: Kit, said: list[int], tier: Tier, **options: object) -> int:
    """Tokens that the pinned session's next turn finds in a tier; what it says is right."""
    prompt = [*PINNED, *said, 7]
    again = kit.ask_checked(prompt, 4, **options)
    return again.receipt.count_reused(tier)


@pytest.mark.parametrize("name", ["n", None])
def test_from_the_host(name: str | None) -> None:
    kit = still(Kit(pages=16, host_pages=32))
    said = kit.ask(PINNED, 4, session=name, keep_until=FOREVER).tokens
    crowd(kit)
    look(kit)
    assert kit.engine.stats().brought_back == 0  # the others have just answered: they are worth as much
    for number in range(3):
        kit.store.forget("a", f"other-{number}")
    look(kit)
    assert kit.engine.stats().brought_back == 1
    assert reused(kit, said, Tier.DEVICE, session=name) == 19


@pytest.mark.parametrize("name", ["n", None])
def test_from_disk(tmp_path: Path, name: str | None) -> None:
    kit = still(Kit(folder=tmp_path, pages=16))
    said = kit.ask(PINNED, 4, session=name, keep_until=FOREVER).tokens
    kit.settle()
    crowd(kit)
    for number in range(3):
        kit.store.forget("a", f"other-{number}")
    assert len(kit.store.residency) == 0
    look(kit)
    assert kit.engine.stats().brought_back == 1
    assert reused(kit, said, Tier.DEVICE, session=name) == 19
    kit.leave()


def test_it_takes_the_place_of_what_is_worth_less() -> None:
    kit = still(Kit(pages=16, host_pages=32))
    turn = kit.send(PINNED, 4, session="n", keep_until=FOREVER)
    kit.run()
    kit.engine.await_tools(AwaitTools(turn, ("build",)))
    crowd(kit)
    session = kit.find("n")
    look(kit)
    assert session.warm


@pytest.mark.parametrize("until", [0.0, FOREVER])
def test_a_pinned_one_is_not_moved_ahead_of_need(until: float) -> None:
    kit = still(Kit(pages=6, host_pages=8))
    kit.ask(PINNED, 4, session="n", keep_until=until)
    kit.ask(OTHERS[0][:3], 1, session="m", keep_until=until)
    assert kit.pool.device.free == 0
    kit.store.retention.clock = lambda: 1e9
    kit.store.residency.demote_late()
    assert (len(kit.store.residency.warm) == 2) is (until > 0)


def test_a_pin_that_is_over_brings_nothing_back() -> None:
    kit = still(Kit(pages=16, host_pages=32))
    kit.ask(PINNED, 4, session="n", keep_until=FOREVER)
    crowd(kit)
    for number in range(3):
        kit.store.forget("a", f"other-{number}")
    kit.store.pin("a", "n", 0.0)
    look(kit)
    assert kit.engine.stats().brought_back == 0
    assert not len(kit.scheduler.pinned)


def test_after_a_restart_a_pin_brings_its_session_up(tmp_path: Path) -> None:
    kit = still(Kit(folder=tmp_path))
    kit.ask(PINNED, 4, session="n")
    kit.leave()
    kit = still(Kit(folder=tmp_path))
    kit.store.pin("a", "n", FOREVER)
    kit.scheduler.pinned.watch(Owner("a", "n", True))
    look(kit)
    session = kit.find("n")
    assert session.warm
    kit.leave()


def test_no_more_than_64_are_watched() -> None:
    kit = still(Kit())
    pinned = PinnedSessions(kit.store)
    for number in range(200):
        pinned.watch(Owner("a", str(number), True))
    assert len(pinned) == 64
    pinned.poll()
    assert not len(pinned)  # nothing is known of them
