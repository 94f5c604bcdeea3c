"""Think times over the engine: the ends of turns, tool calls, pings, side calls and announcements, as the server sends
them. The clock is the test's.
"""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from engine_kit import Kit, await_announced
from tiny_models import greedy

from cache.pages.retention import Stop
from cache.tier import StopKind, Tier
from scheduler.core.prefetcher import Prefetcher
from scheduler.protocol import AwaitTools, Warm, pack_ids

PROMPTS = [[20 * n + token for token in range(16)] for n in range(6)]


class Hour:
    """A clock that only the test moves."""

    def __init__(self, kit: Kit) -> None:
        self.now = 1000.0
        kit.store.retention.clock = lambda: self.now


def stop_of(kit: Kit, name: str) -> Stop:
    """The stop of a named session in memory."""
    session = kit.find(name)
    assert session.stop is not None
    return session.stop


@pytest.mark.parametrize("session", ["n", None])
def test_a_gap_runs_from_the_end_of_a_turn_to_the_next_request(session: str | None) -> None:
    kit = Kit()
    clock = Hour(kit)
    first = kit.send(PROMPTS[0], 4, session=session)
    kit.run()
    assert (kit.outcomes[first].receipt.after, kit.outcomes[first].receipt.idle) == (None, None)
    kit.engine.await_tools(AwaitTools(first, ("ls",)))
    clock.now += 7
    second = kit.send([*PROMPTS[0], *kit.outcomes[first].tokens, 9], 4, session=session)
    clock.now += 100  # it waits; that is no think time
    kit.run()
    assert (kit.outcomes[second].receipt.after, kit.outcomes[second].receipt.idle) == (StopKind.TOOL, 7.0)
    clock.now += 3
    third = kit.send([*PROMPTS[0], *kit.outcomes[first].tokens, 9, *kit.outcomes[second].tokens, 9], 4, session=session)
    kit.run()
    assert (kit.outcomes[third].receipt.after, kit.outcomes[third].receipt.idle) == (StopKind.ANSWER, 3.0)


def test_tool_calls_of_unknown_turns_are_nothing() -> None:
    kit = Kit()
    kit.engine.await_tools(AwaitTools("nobody", ("ls",)))
    for number in range(1100):
        kit.scheduler._stops[str(number)] = kit.store.retention.stop("a", StopKind.ANSWER)
    kit.ask(PROMPTS[0], 2)
    assert len(kit.scheduler._stops) <= 1100  # one goes for each that comes


def test_the_ends_of_turns() -> None:
    kit = Kit()
    kit.ask(PROMPTS[0], 4, session="answer")
    kit.ask(PROMPTS[1], 1, session="ping")
    kit.ask(PROMPTS[2], 4, session="side", side=True)
    kit.ask(PROMPTS[3], 0, session="warm", side=True)
    kinds = {name: stop_of(kit, name).kind for name in ("answer", "ping", "side", "warm")}
    assert kinds == {
        "answer": StopKind.ANSWER,
        "ping": StopKind.WARM_UP,
        "side": StopKind.SIDE,
        "warm": StopKind.WARM_UP,
    }


def test_a_ping_refreshes_and_is_no_continuation() -> None:
    kit = Kit()
    clock = Hour(kit)
    first = kit.send(PROMPTS[0], 6)
    kit.run()
    line = kit.store.nearest("a", array("i", PROMPTS[0]))
    assert line is not None
    clock.now += 240
    kit.ask(PROMPTS[0], 1)
    assert line.stop is not None
    assert (line.stop.since, line.stop.at, line.stop.returned) == (clock.now, clock.now - 240, False)
    clock.now += 60
    again = kit.send([*PROMPTS[0], *kit.outcomes[first].tokens, 9], 2)
    kit.run()
    assert kit.outcomes[again].receipt.idle == 300.0


def test_children_keep_their_parent_young() -> None:
    kit = Kit()
    clock = Hour(kit)
    turn = kit.send(PROMPTS[0], 4, session="parent")
    kit.run()
    kit.engine.await_tools(AwaitTools(turn, ("agent",)))
    clock.now += 100
    kit.ask(PROMPTS[1], 4, session="child", parent="parent")
    stop = stop_of(kit, "parent")
    assert (stop.since, stop.at) == (clock.now, clock.now - 100)


def test_evictions_and_holds_are_told() -> None:
    kit = Kit(pages=6)
    clock = Hour(kit)
    for prompt in PROMPTS:
        kit.ask(prompt, 4)
        clock.now += 5
    stats = kit.engine.stats()
    assert stats.evictions_after == {"answer": stats.tier(Tier.DEVICE).evictions}
    assert set(stats.hold_seconds) == set(StopKind)
    assert 0 < stats.hold_seconds["tool"] < stats.hold_seconds["answer"]


def test_a_named_session_is_brought_up_from_disk_when_it_is_announced(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path, pages=64)
    first = kit.ask(PROMPTS[0], 6, session="n")
    kit.settle()
    kit.leave()
    again = Kit(folder=tmp_path, pages=64)
    assert again.store.find("a", "n") is None
    again.engine.warm(Warm("a", "n"))
    await_announced(again)
    session = again.find("n")
    assert session.warm
    assert again.engine.stats().warmed == 1
    prompt = [*PROMPTS[0], *first.tokens, 9]
    turn = again.send(prompt, 4, session="n")
    again.run()
    assert again.outcomes[turn].receipt.count_reused(Tier.DEVICE) == len(prompt) - 2
    assert again.outcomes[turn].tokens == greedy(again.model, prompt, 4, again.outcomes[turn].tokens)
    again.leave()


def test_an_announced_prompt_brings_up_what_it_begins_with(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path, pages=64)
    kit.ask(PROMPTS[0], 6)
    kit.settle()
    kit.leave()
    again = Kit(folder=tmp_path, pages=64)
    again.engine.warm(Warm("a", prompt=pack_ids([*PROMPTS[0], 3, 4])))
    again.engine.warm(Warm("b", prompt=pack_ids(PROMPTS[0])))  # another tenant's
    await_announced(again)
    assert again.engine.stats().warmed == 1
    assert again.store.match("a", array("i", [*PROMPTS[0], 3])) == len(PROMPTS[0])
    assert again.store.match("b", array("i", [*PROMPTS[0], 3])) == 0
    again.leave()


def test_an_announcement_evicts_nothing_that_is_expected_sooner(tmp_path: Path) -> None:
    kit = Kit(folder=tmp_path, pages=12)
    kit.ask(PROMPTS[0], 6, session="n")
    kit.settle()
    kit.leave()
    kit = Kit(folder=tmp_path, pages=12)
    clock = Hour(kit)
    for number in (1, 2):
        turn = kit.send(PROMPTS[number], 6, session=str(number))
        kit.run()
        kit.engine.await_tools(AwaitTools(turn, ("ls",)))
    kit.settle()
    kit.engine.warm(Warm("a", "n"))
    kit.step()
    assert len(kit.scheduler.prefetcher) == 1
    clock.now += 20  # the tools are late now, and it may take the place of one
    await_announced(kit)
    assert kit.store.find("a", "n") is not None
    kit.leave()


def test_announcements_are_bounded_and_forgotten() -> None:
    kit = Kit()
    clock = Hour(kit)
    kit.ask(PROMPTS[0], 6, session="n")
    prefetcher = Prefetcher(kit.store)
    for number in range(200):
        prefetcher.add(Warm("a", str(number)))
    assert len(prefetcher) == 64
    prefetcher.poll()
    assert not len(prefetcher)  # nothing is known of them
    prefetcher.add(Warm("a", "n", until=5e9))
    clock.now += 1
    prefetcher.poll()
    assert not len(prefetcher)
    session = kit.find("n")
    assert session.pinned_until == 5e9
    assert kit.engine.stats().warmed == 0  # it was there
