"""Spare turns: they run where nobody else needs the step, the place or the pages, and their replies stay the same."""

from __future__ import annotations

from typing import Any

import pytest
from engine_kit import PAGE, Kit
from tiny_models import greedy, make_tokenizer

from scheduler.core.fair_queue import FairQueue, QueueFull
from scheduler.core.spare_time import SpareTime
from scheduler.core.text import TextStream, Vocabulary
from scheduler.core.turn import Turn, TurnStatus
from scheduler.protocol import Submit, pack_ids

PROMPT = [*range(40, 60)]
_vocabulary = Vocabulary(make_tokenizer())


def waiting(tenant: str, *, spare: bool = False) -> Turn:
    return Turn(Submit("t", tenant, pack_ids([1]), spare=spare), TextStream(_vocabulary, ()))


def plans_of(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[Turn, int]]]:
    """Every step's plan, as it is made."""
    plans: list[list[tuple[Turn, int]]] = []
    schedule = kit.scheduler.schedule

    def watch() -> Any:
        plans.append(schedule())
        return plans[-1]

    monkeypatch.setattr(kit.scheduler, "schedule", watch)
    return plans


def is_true(kit: Kit, turn: str, prompt: list[int], count: int) -> None:
    """The reply is that of a forward from scratch."""
    outcome = kit.outcomes[turn]
    assert outcome.tokens == greedy(kit.model, prompt, count, outcome.tokens)


def test_a_step_has_spare_turns_or_others(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(step_tokens=16)
    monkeypatch.setattr(kit.scheduler.spare_time, "tokens", lambda most: 0)  # however slow the machine is
    plans = plans_of(kit, monkeypatch)
    spare = [kit.send([*PROMPT, n], 6, spare=True) for n in range(3)]
    kit.step(4)
    asked = kit.send([1, 2, 3], 5)
    steps = len(plans)
    while kit.outcomes[asked].finish_reason is None:
        kit.step()
    assert len(plans) - steps == 5  # as many as it takes alone
    kit.run()
    assert all(len({turn.spare for turn, _ in plan}) == 1 for plan in plans if plan)
    assert max(sum(count for _, count in plan) for plan in plans if plan and plan[0][0].spare) <= 4
    is_true(kit, asked, [1, 2, 3], 5)
    for number, turn in enumerate(spare):
        is_true(kit, turn, [*PROMPT, number], 6)


def test_a_full_batch_makes_a_place_for_a_turn_that_is_not_spare() -> None:
    kit = Kit(max_running=2)
    spare = [kit.send([n, *PROMPT], 20, spare=True) for n in range(3)]
    kit.step(8)
    asked = kit.send([1, 2, 3], 3)
    kit.step()
    assert kit.outcomes[asked].tokens
    assert kit.scheduler.preemptions == 1
    other = kit.send([7, 8], 2)
    kit.step()
    assert kit.outcomes[other].tokens
    kit.run()
    for number, turn in enumerate(spare):
        is_true(kit, turn, [number, *PROMPT], 20)
    is_true(kit, asked, [1, 2, 3], 3)


def test_pages_are_taken_from_spare_turns() -> None:
    kit = Kit(pages=-(-64 // PAGE))
    spare = kit.send(PROMPT, 20, spare=True)
    while len(kit.outcomes[spare].tokens) < 5:
        kit.step()
    prompt = [*range(100, 100 + kit.pool.room - 8)]
    asked = kit.send(prompt, 4)
    kit.step()
    turn = kit.scheduler.find(spare)
    assert turn is not None
    assert turn.status is TurnStatus.WAITING
    kit.run()
    is_true(kit, asked, prompt, 4)
    is_true(kit, spare, PROMPT, 20)


def test_no_spare_turn_begins_while_another_waits() -> None:
    kit = Kit(max_running=1)
    first, second = kit.send([1, 2], 4), kit.send([3, 4], 4)
    spare = kit.send(PROMPT, 2, spare=True)
    while kit.outcomes[second].finish_reason is None:
        kit.step()
        assert not kit.outcomes[spare].tokens
    assert kit.outcomes[first].finish_reason is not None
    kit.run()
    is_true(kit, spare, PROMPT, 2)


def test_nobody_waits_for_a_prefix_that_a_spare_turn_computes() -> None:
    kit = Kit(step_tokens=8)
    kit.send([*PROMPT, 1], 2, spare=True)
    kit.step()
    asked = kit.send([*PROMPT, 2], 2)
    steps = 0
    while kit.outcomes[asked].finish_reason is None:
        kit.step()
        steps += 1
    assert steps <= 5  # three of prefill and two of decode, or less
    is_true(kit, asked, [*PROMPT, 2], 2)


def test_spare_turns_stand_behind_all_others_and_leave_them_places() -> None:
    queue = FairQueue(4)
    spare = [waiting("a", spare=True) for _ in range(2)]
    for turn in spare:
        queue.add(turn, set())
    assert not queue.has_urgent()
    with pytest.raises(QueueFull):
        queue.add(waiting("b", spare=True), set())
    others = [waiting(tenant) for tenant in "ab"]
    for turn in others:
        queue.add(turn, set())
    assert queue.has_urgent()
    assert [*queue.in_order(9)] == others
    assert [*queue.in_order(9, spare=True)] == spare
    with pytest.raises(QueueFull):
        queue.add(waiting("c"), set())
    assert queue.find_crowding("c") is spare[1]  # it makes room
    queue.remove(spare[1])
    queue.put_back(spare[1])
    assert [*queue.in_order(9, spare=True)] == [spare[1], spare[0]]


def test_what_a_tenants_spare_turns_use_does_not_put_its_others_back() -> None:
    queue = FairQueue(9)
    queue.charge("a", 1000, spare=True)
    queue.charge("b", 10)
    turns = [waiting("b"), waiting("a")]
    for turn in turns:
        queue.add(turn, {"b"})
    queue.charge("b", 1)
    assert (queue.tokens_served("a"), queue.tokens_served("a", spare=True)) == (10, 1000)
    assert [*queue.in_order(1)] == [turns[1], turns[0]]


def test_beside_turns_that_never_pause_spare_turns_get_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps in which all others decode, as many tokens as are granted; others lose no step and stand before them."""
    kit = Kit(step_tokens=64)
    monkeypatch.setattr(kit.scheduler.spare_time, "tokens", lambda most: min(most, 3))
    plans = plans_of(kit, monkeypatch)
    spare = kit.send(PROMPT, 4, spare=True)
    asked: list[str] = []
    while kit.outcomes[spare].finish_reason is None:
        if not asked or len(kit.outcomes[asked[-1]].tokens) >= 7:
            asked.append(kit.send([1, 2, len(asked)], 9))  # before the last one is over
        kit.step()
        assert len(asked) < 20
    assert len(asked) > 1
    kit.run()
    for plan in plans:
        beside = sum(count for turn, count in plan if turn.spare)
        others = [count for turn, count in plan if not turn.spare]
        assert beside <= (3 if others else 16)
        assert not beside or all(count == 1 for count in others)
    steps = [number for number, plan in enumerate(plans) if any(turn.request.turn == asked[0] for turn, _ in plan)]
    assert steps == [*range(steps[0], steps[0] + 9)]  # as many as it takes alone, one after the other
    is_true(kit, spare, PROMPT, 4)
    for number, turn in enumerate(asked):
        is_true(kit, turn, [1, 2, number], 9)


def test_pages_for_a_spare_token_are_not_taken_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(pages=12)
    monkeypatch.setattr(kit.scheduler.spare_time, "tokens", lambda most: most)
    spare = kit.send(PROMPT, 20, spare=True)
    kit.step()
    asked = kit.send([1, 2, 3], 20)
    while kit.outcomes[asked].finish_reason is None:
        kit.step()
        turn = kit.scheduler.find(asked)
        assert turn is None or turn.status is TurnStatus.RUNNING
    kit.run()
    is_true(kit, asked, [1, 2, 3], 20)
    is_true(kit, spare, PROMPT, 20)


def test_spare_tokens_lengthen_the_steps_of_others_by_a_sixteenth() -> None:
    """Over many steps, with the cost that they turn out to have; a step with a prompt saves time, and grants none."""
    other, spare = waiting("a"), waiting("a", spare=True)
    time = SpareTime()
    time.record([(other, 30)], 10.0)
    assert time.tokens(32) == 0  # it is not known yet what a step takes
    lost = taken = fed = 0.0
    for _ in range(4000):
        count = time.tokens(32)
        usual, longer = 0.02, 0.004 * count
        time.record([(other, 1), *([(spare, count)] if count else [])], usual + longer)
        lost, taken, fed = lost + longer, taken + usual, fed + count
        time.record([(spare, 128)], 5.0)  # nobody else was there
    assert 0.9 / 16 < lost / taken < 1.1 / 16
    assert fed > 1000
    time.record([(other, 1), (spare, 1)], 1e6)  # the machine slept
    for _ in range(1000):
        time.record([(other, 1)], 0.02)
    assert time.tokens(32) > 0
