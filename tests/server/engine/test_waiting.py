"""The server's count of waiting turns says of a full queue what the engine's queue says."""

from __future__ import annotations

import random

import pytest

from scheduler.core.fair_queue import FairQueue
from scheduler.core.turn import Turn
from scheduler.protocol import Submit, pack_ids
from scheduler.sampling_params import Stopping
from server.engine.waiting import LONGEST, RECENT, WaitingTurns

CAPACITY = 6


def turn(name: str, tenant: str) -> Turn:
    return Turn(Submit(name, tenant, pack_ids([1, 2]), stopping=Stopping(max_tokens=1)), text=None, start=())  # type: ignore[arg-type]


def test_both_refuse_the_same_tenants() -> None:
    """A random crowd: turns come, are admitted, and take each other's places, at the same time in both counts."""
    draw = random.Random(7)
    seen = {True: 0, False: 0}
    queue, waiting = FairQueue(CAPACITY), WaitingTurns(CAPACITY)
    lined: dict[str, Turn] = {}
    for number in range(3000):
        tenant = draw.choice("aaaabbc")
        full = len(queue) >= CAPACITY
        crowding = queue.find_crowding(tenant) if full else None
        assert waiting.full(tenant) == (full and crowding is None)
        if full:
            seen[crowding is None] += 1
        leaving = crowding if full else None
        if draw.random() < 0.4 and lined:
            leaving = draw.choice(list(lined.values()))
        if leaving is not None:
            queue.remove(leaving)
            waiting.remove(leaving.request.turn)
            waiting.remove(leaving.request.turn)  # its end is told twice: refused, and gone
            del lined[leaving.request.turn]
        if len(queue) < CAPACITY:
            new = lined[str(number)] = turn(str(number), tenant)
            queue.add(new, set())
            waiting.add(str(number), tenant)
    assert min(seen.values()) > 50


def test_a_fresh_engine_has_an_empty_queue() -> None:
    waiting = WaitingTurns(1)
    waiting.add("t", "a")
    assert waiting.full("a")
    waiting.clear()
    assert not waiting.full("a")


def test_who_finds_the_queue_full_is_told_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns leave it every half second, then faster, then not at all."""
    now = 100.0
    monkeypatch.setattr("server.engine.waiting.time.monotonic", lambda: now)
    waiting = WaitingTurns(20)
    assert waiting.retry_after() == 1

    def lined(number: int) -> None:
        for one in range(number):
            waiting.add(f"{now} {one}", "a")

    for number in range(RECENT):
        lined(1)
        now += 0.5
        waiting.leave(f"{now - 0.5} 0")
        waiting.leave(f"{now - 0.5} 0")  # as every delta of it says
        waiting.add(f"refused {number}", "a")
        waiting.remove(f"refused {number}")  # it never stood in the queue
    lined(20)
    assert waiting.retry_after() == 10  # 20 of half a second, and the time since the last is part of the measure
    for _ in range(RECENT):
        waiting.add("quick", "a")
        now += 0.01
        waiting.leave("quick")
    assert waiting.retry_after() == 1
    now += 3600
    assert waiting.retry_after() == LONGEST
    waiting.clear()
    assert waiting.retry_after() == 1
