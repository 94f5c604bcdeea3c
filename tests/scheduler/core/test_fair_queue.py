"""Who is next: first come, first served within a tenant, the least served tenant first."""

from __future__ import annotations

import random

import pytest
from tiny_models import make_tokenizer

from scheduler.core.fair_queue import FairQueue, QueueFull
from scheduler.core.text import TextStream, Vocabulary
from scheduler.core.turn import Turn
from scheduler.protocol import Submit, pack_ids

_vocabulary = Vocabulary(make_tokenizer())


def turn_of(tenant: str) -> Turn:
    return Turn(Submit("t", tenant, pack_ids([1])), TextStream(_vocabulary, ()))


def test_one_tenant_is_served_in_order() -> None:
    queue = FairQueue(10)
    turns = [turn_of("a") for _ in range(5)]
    for turn in turns:
        queue.add(turn, set())
    assert list(queue.in_order(3)) == turns[:3]
    assert list(queue) == turns
    queue.remove(turns[1])
    assert list(queue.in_order(3)) == [turns[0], turns[2], turns[3]]
    assert len(queue) == 4


def test_a_preempted_turn_is_first_in_its_line() -> None:
    queue = FairQueue(2)
    first, second, preempted = (turn_of("a") for _ in range(3))
    queue.add(first, {"a"})
    queue.add(second, {"a"})
    queue.put_back(preempted)  # never refused
    assert list(queue) == [preempted, first, second]
    assert len(queue) == 3


def test_a_full_queue_refuses_and_keeps_what_it_has() -> None:
    queue = FairQueue(2)
    turns = [turn_of("a"), turn_of("b")]
    for turn in turns:
        queue.add(turn, set())
    for tenant in ("a", "b", "c"):
        with pytest.raises(QueueFull):
            queue.add(turn_of(tenant), set())
    assert set(queue) == set(turns)
    queue.remove(turns[0])
    queue.add(turn_of("c"), set())


def test_who_crowds_a_full_queue_is_the_newest_of_the_longest_line() -> None:
    queue = FairQueue(10)
    assert queue.find_crowding("a") is None
    lines = {tenant: [turn_of(tenant) for _ in range(length)] for tenant, length in (("a", 4), ("b", 3), ("c", 1))}
    for turn in (turn for line in lines.values() for turn in line):
        queue.add(turn, set())
    assert queue.find_crowding("a") is None
    assert queue.find_crowding("b") is None  # it would be as long
    assert queue.find_crowding("c") is lines["a"][-1]
    assert queue.find_crowding("nobody yet") is lines["a"][-1]
    lines["a"][-1].announced = True
    assert queue.find_crowding("c") is lines["a"][-2]


def test_where_preempted_turns_overfill_the_queue_nobody_makes_room() -> None:
    queue = FairQueue(2)
    for turn in (turn_of("a"), turn_of("a")):
        queue.add(turn, set())
    queue.put_back(turn_of("a"))
    assert queue.find_crowding("b") is None


def test_the_tenant_that_was_served_least_is_first() -> None:
    queue = FairQueue(10)
    a, b = turn_of("a"), turn_of("b")
    queue.add(a, set())
    queue.add(b, set())
    queue.charge("a", 5)
    assert list(queue.in_order(1)) == [b, a]
    queue.charge("b", 6)
    assert list(queue.in_order(1)) == [a, b]


def test_who_comes_back_has_earned_no_credit_by_idling() -> None:
    queue = FairQueue(10)
    queue.add(turn_of("busy"), set())
    queue.charge("busy", 1000)
    queue.add(turn_of("late"), set())
    assert queue.tokens_served("late") == 1000
    queue.charge("busy", 50)
    queue.add(turn_of("late"), set())  # it waits already: not lifted again
    assert queue.tokens_served("late") == 1000


def test_running_tenants_count_as_active() -> None:
    queue = FairQueue(10)
    first = turn_of("busy")
    queue.add(first, set())
    queue.charge("busy", 70)
    queue.remove(first)  # admitted: it waits no more, but runs
    queue.add(turn_of("late"), {"busy"})
    assert queue.tokens_served("late") == 70


def test_a_tenant_ahead_of_the_others_is_not_forgiven() -> None:
    queue = FairQueue(10)
    first = turn_of("greedy")
    queue.add(first, set())
    queue.charge("greedy", 500)
    queue.remove(first)
    queue.add(turn_of("modest"), set())
    queue.add(turn_of("greedy"), set())
    assert queue.tokens_served("greedy") == 500


def test_equal_demand_is_served_equally() -> None:
    """Three tenants, one of which sends much more: each gets a third."""
    rng = random.Random(1)
    queue = FairQueue(10_000)
    for tenant, count in (("a", 1000), ("b", 300), ("c", 300)):
        for _ in range(count):
            queue.add(turn_of(tenant), set())
    given = {"a": 0, "b": 0, "c": 0}
    for _ in range(300):
        turn = next(queue.in_order(1))
        queue.remove(turn)
        tokens = rng.randint(1, 20)
        queue.charge(turn.request.tenant, tokens)
        given[turn.request.tenant] += tokens
    assert max(given.values()) - min(given.values()) <= 40
