"""Which session leaves memory first, by how its last turn ended and how long ago. The clock is the test's."""

from __future__ import annotations

from array import array

import pytest
from store_bench import SIZE, Bench

from cache.pages.retention import Stop
from cache.pages.session import SessionCache
from cache.tier import StopKind, Tier


class Desk:
    """A bench with a clock, and turns that end in some way."""

    def __init__(self, device: int, host: int = 0) -> None:
        self.now = 100.0
        self.bench = Bench(device, host, lambda: self.now)
        self.store = self.bench.store

    def turn(
        self,
        prompt: list[int],
        kind: StopKind = StopKind.ANSWER,
        name: str | None = None,
        tools: tuple[str, ...] = (),
        side: bool = False,
        parent: str | None = None,
    ) -> SessionCache:
        """One turn that comes and ends now."""
        acquired = self.store.acquire("a", name, array("i", prompt), side=side, parent=parent, aside=side)
        assert acquired is not None
        session = acquired.session
        self.store.resume(session, self.now, ping=kind is StopKind.WARM_UP)
        self.bench.feed(session, len(prompt) - session.length)
        self.store.publish(session)
        stop = self.store.retention.stop("a", kind)
        self.store.release(session, stop)
        if tools:
            self.store.retention.await_tools(stop, tools)
        self.bench.check()
        return session

    def stop_of(self, session: SessionCache) -> Stop:
        assert session.stop is not None
        return session.stop

    def has(self, session: SessionCache) -> bool:
        return session in self.bench.sessions()


def numbered(first: int, count: int = 2 * SIZE) -> list[int]:
    """A prompt that shares nothing with others."""
    return list(range(1000 * first, 1000 * first + count))


def test_an_answer_goes_before_a_tool_call_that_is_older() -> None:
    desk = Desk(4)
    calls = desk.turn(numbered(1), tools=("ls",))
    desk.now += 5
    answers = desk.turn(numbered(2))
    desk.now += 1
    desk.turn(numbered(3))
    assert desk.has(calls)
    assert not desk.has(answers)
    assert desk.store.retention.evictions == {StopKind.ANSWER: 1}


def test_a_tool_call_that_takes_too_long_goes_before_an_answer() -> None:
    desk = Desk(4)
    calls = desk.turn(numbered(1), tools=("ls",))
    desk.now += 4000
    answers = desk.turn(numbered(2))
    desk.now += 60
    desk.turn(numbered(3))
    assert not desk.has(calls)
    assert desk.has(answers)


def test_a_tools_own_history_decides() -> None:
    desk = Desk(4)
    for tool, gap in (("ls", 1), ("build", 600)):
        for _ in range(40):
            stop = desk.store.retention.stop("a", StopKind.ANSWER)
            desk.store.retention.await_tools(stop, (tool,))
            assert desk.store.retention.resume(stop, desk.now + gap) == gap
    builds = desk.turn(numbered(4), tools=("build",))
    lists = desk.turn(numbered(5), tools=("ls",))
    desk.now += 500  # far too long for the one, nearly what the other takes
    desk.turn(numbered(6))
    assert desk.has(builds)
    assert not desk.has(lists)


def test_a_gap_is_learned_once_from_the_request_that_goes_on() -> None:
    desk = Desk(40)
    first = desk.turn(numbered(1), name="n")
    stop, known = desk.stop_of(first), desk.store.retention._times.of("a").kinds[StopKind.ANSWER]
    before = known.weight
    acquired = desk.store.acquire("a", "n", array("i", [*numbered(1), 5]))
    assert acquired is not None
    assert desk.store.resume(acquired.session, desk.now + 7) == (stop, 7.0)
    assert known.weight == pytest.approx(before * 127 / 128 + 1)
    assert stop.returned
    assert desk.store.retention.resume(stop, desk.now + 9) is None
    desk.bench.feed(acquired.session, 1)
    desk.store.release(acquired.session, desk.store.retention.stop("a", StopKind.ANSWER))


def test_a_branch_that_was_left_goes_first() -> None:
    desk = Desk(8)
    left = desk.turn([*numbered(1), 7, 7, 7, 7])  # the reply
    left.asked = 2 * SIZE
    desk.now += 10
    other = desk.turn(numbered(2))
    desk.now += 1
    goes_on = desk.turn([*numbered(1), 8, 8, 8, 8, 9])  # written anew behind the prompt
    assert desk.stop_of(left).returned
    desk.turn(numbered(3, SIZE + 1))
    assert desk.has(goes_on)
    assert desk.has(other)
    assert not desk.has(left)


def test_a_side_call_forks_its_line_and_leaves_nothing_of_worth() -> None:
    desk = Desk(6)
    line = desk.turn(numbered(1), tools=("ls",))
    other = desk.turn(numbered(2), tools=("ls",))
    aside = desk.turn([*numbered(1), 50, 51], kind=StopKind.SIDE, side=True)
    assert aside is not line
    assert line.length == 2 * SIZE
    assert not desk.stop_of(line).returned
    desk.turn(numbered(3, SIZE + 2))
    assert not desk.has(aside)
    assert desk.has(line)
    assert desk.has(other)


@pytest.mark.parametrize("parent", [None, "line"])
def test_a_side_call_never_evicts_its_line(parent: str | None) -> None:
    desk = Desk(7)
    line = desk.turn(numbered(1), name="line")  # worth less than the other one
    desk.now += 1000
    other = desk.turn(numbered(2), tools=("ls",))
    prompt = numbered(3, 4 * SIZE) if parent else [*numbered(1), *numbered(3, 4 * SIZE)]
    desk.turn(prompt, kind=StopKind.SIDE, side=True, parent=parent)
    assert desk.has(line)
    assert not desk.has(other)


@pytest.mark.parametrize("aside", [False, True])
def test_a_turn_waits_rather_than_evict_its_parent_and_a_side_call_also_alone(aside: bool) -> None:
    desk = Desk(6)
    line = desk.turn(numbered(1), name="line")
    other = desk.turn(numbered(5))
    running = desk.store.acquire("a", None, array("i", numbered(2)))
    assert running is not None
    prompt = array("i", numbered(3, 4 * SIZE))
    assert desk.store.acquire("a", None, prompt, side=aside, parent="line", aside=aside) is None
    assert desk.has(line)
    assert desk.has(other)  # nobody is evicted for nothing
    desk.bench.feed(running.session, 2 * SIZE)
    desk.store.discard(running.session)
    alone = desk.store.acquire("a", None, array("i", numbered(4, 5 * SIZE)), side=aside, parent="line", aside=aside)
    assert (alone is None, desk.has(line), desk.has(other)) == (aside, aside, aside)


def test_alone_a_side_call_may_send_its_line_to_the_host() -> None:
    desk = Desk(6, host=4)
    line = desk.turn(numbered(1), name="line")
    desk.now += 1000  # it is worth less than the others
    others = [desk.turn(numbered(2)), desk.turn(numbered(3))]
    desk.turn(numbered(4, 6 * SIZE), kind=StopKind.SIDE, side=True, parent="line")
    assert desk.has(line)
    assert not line.warm
    assert sum(map(desk.has, others)) == 1  # they go first there too


def test_what_a_side_call_has_left_is_not_spared_for_the_next_one() -> None:
    desk = Desk(6)
    left = desk.turn([*numbered(1), 50, 51], kind=StopKind.SIDE, side=True)
    desk.turn([*numbered(1), *numbered(2, 4 * SIZE)], kind=StopKind.SIDE, side=True)
    assert not desk.has(left)


def test_a_ping_refreshes_the_prefix_that_it_matches() -> None:
    desk = Desk(6)
    pinged = desk.turn(numbered(1))
    other = desk.turn(numbered(2))
    desk.now += 1000
    desk.turn(numbered(1), kind=StopKind.WARM_UP)
    stop = desk.stop_of(pinged)
    assert (stop.returned, stop.since, stop.at) == (False, desk.now, desk.now - 1000)
    desk.turn(numbered(3))
    assert desk.has(pinged)
    assert not desk.has(other)


def test_a_parent_stays_young_while_its_children_run() -> None:
    desk = Desk(6)
    parent = desk.turn(numbered(1), name="parent", tools=("agent",))
    desk.now += 200
    other = desk.turn(numbered(2), tools=("ls",))
    desk.now += 100
    desk.store.refresh("a", "parent")
    desk.turn(numbered(3, 4 * SIZE), parent="parent")
    assert desk.has(parent)
    assert not desk.has(other)


def test_what_is_lost_counts_as_a_longer_gap() -> None:
    desk = Desk(4)
    known = desk.store.retention._times.of("a").kinds[StopKind.ANSWER]
    desk.turn(numbered(1))
    before = list(known._weights)
    desk.now += 50_000
    desk.turn(numbered(2, 4 * SIZE))
    assert known._weights[0] < before[0]
    assert known._weights[-1] > before[-1]


def test_the_host_drops_what_is_worth_least() -> None:
    desk = Desk(4, host=4)
    calls = desk.turn(numbered(1), tools=("ls",))
    answers = desk.turn(numbered(2))
    third = desk.turn(numbered(3))
    fourth = desk.turn(numbered(4))
    desk.turn(numbered(5))
    assert desk.has(calls)
    assert sum(desk.has(session) for session in (answers, third, fourth)) == 2
    assert desk.store.residency.evictions[Tier.HOST] == 1


def test_what_is_late_goes_to_the_host_before_room_is_needed() -> None:
    desk = Desk(4, host=8)
    calls = desk.turn(numbered(1), tools=("ls",))
    answers = desk.turn(numbered(2))
    desk.store.residency.demote_late()
    assert calls.warm
    assert answers.warm
    desk.now += 900
    desk.store.residency.demote_late()
    assert (calls.warm, answers.warm) == (False, True)
    desk.now += 0.1
    desk.store.residency.demote_late()
    assert answers.warm  # there is room again
    desk.bench.check()


def test_nothing_is_demoted_without_a_host() -> None:
    desk = Desk(4)
    calls = desk.turn(numbered(1, 4 * SIZE), tools=("ls",))
    desk.now += 90_000
    desk.store.residency.demote_late()
    assert calls.warm


def test_an_announced_session_is_brought_up_if_others_are_worth_less() -> None:
    desk = Desk(4, host=8)
    hosted = desk.turn(numbered(1))
    desk.turn(numbered(2), tools=("ls",))
    desk.turn(numbered(3), tools=("ls",))
    assert not hosted.warm
    assert not desk.store.warm_up(hosted)  # the others are expected sooner
    assert not hosted.warm
    desk.now += 400
    assert desk.store.warm_up(hosted)
    assert hosted.warm
    assert desk.store.retention.warmed == 1
    desk.bench.check()
    desk.turn(numbered(4))
    assert hosted.warm
