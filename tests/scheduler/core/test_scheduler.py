"""Continuous batching: who is in a step, with how many tokens, and who has to wait."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_kit import Kit
from tiny_models import greedy

from scheduler.core.turn import TurnStatus
from scheduler.protocol import FinishReason


def watch_plans(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Every step's plan as turn id -> tokens, as it is made."""
    plans: list[dict[str, int]] = []
    schedule = kit.scheduler.schedule

    def watch() -> Any:
        plan = schedule()
        plans.append({turn.request.turn: count for turn, count in plan})
        return plan

    monkeypatch.setattr(kit.scheduler, "schedule", watch)
    return plans


@pytest.mark.parametrize("budget", [1, 3, 8, 64])
def test_the_token_budget_is_kept_and_used(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(step_tokens=budget)
    plans = watch_plans(kit, monkeypatch)
    rng = random.Random(budget)
    lengths = [rng.randint(1, 25) for _ in range(6)]
    turns = [kit.send([rng.randrange(200) for _ in range(n)], 3) for n in lengths]
    kit.run()
    assert all(0 < sum(plan.values()) <= budget for plan in plans)
    assert all(count > 0 for plan in plans for count in plan.values())
    for turn, length in zip(turns, lengths, strict=True):
        receipt = kit.outcomes[turn].receipt
        fed = sum(plan.get(turn, 0) for plan in plans)
        assert fed == length - receipt.cached + 2  # all but the last of its three tokens
    assert max(sum(plan.values()) for plan in plans) == min(budget, sum(lengths))


def test_prefill_chunks_and_decodes_share_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(step_tokens=8)
    plans = watch_plans(kit, monkeypatch)
    decoding = kit.send([1, 2, 3], 10)
    kit.step()
    prompt = list(range(100, 120))
    prefilling = kit.send(prompt, 2)
    kit.run()
    mixed = [plan for plan in plans if plan.get(prefilling, 0) > 1]
    assert [plan[decoding] for plan in mixed] == [1, 1, 1]
    assert [plan[prefilling] for plan in mixed] == [7, 7, 6]
    assert kit.outcomes[decoding].tokens == greedy(kit.model, [1, 2, 3], 10, kit.outcomes[decoding].tokens)
    assert kit.outcomes[prefilling].tokens == greedy(kit.model, prompt, 2, kit.outcomes[prefilling].tokens)


def test_no_more_run_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(max_running=3)
    plans = watch_plans(kit, monkeypatch)
    turns = [kit.send([i, 1, 2], 4) for i in range(8)]
    kit.run()
    assert max(len(plan) for plan in plans) == 3
    assert all(len(kit.outcomes[turn].tokens) == 4 for turn in turns)


def test_decodes_beyond_the_budget_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(step_tokens=32)
    turns = [kit.send([i, 50], 12) for i in range(6)]
    kit.step()
    kit.scheduler._max_step_tokens = 2
    kit.step(9)
    made = [len(kit.outcomes[turn].tokens) for turn in turns]
    assert sum(made) == 6 + 18
    assert max(made) - min(made) <= 1


# -- shared prefixes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_tokens", [7, 32, 512])
def test_equal_prompts_are_prefilled_once(step_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(step_tokens=step_tokens)
    plans = watch_plans(kit, monkeypatch)
    prompt = list(range(30, 70))
    turns = [kit.send(prompt, 3) for _ in range(5)]
    kit.run()
    receipts = [kit.outcomes[turn].receipt for turn in turns]
    assert sorted(r.cached for r in receipts) == [0, 39, 39, 39, 39]
    assert sum(sum(plan.values()) for plan in plans) == 40 + 4 + 5 * 2
    want = greedy(kit.model, prompt, 3)
    assert all(kit.outcomes[turn].tokens == want for turn in turns)


def test_a_burst_with_one_system_prompt_prefills_it_once() -> None:
    kit = Kit(step_tokens=16)
    system = list(range(40))
    turns = [kit.send([*system, 100 + i, 7, 8], 2) for i in range(6)]
    kit.run()
    receipts = [kit.outcomes[turn].receipt for turn in turns]
    assert sorted(r.cached for r in receipts) == [0, 40, 40, 40, 40, 40]


def test_who_waits_for_a_prefix_goes_on_when_its_owner_leaves() -> None:
    kit = Kit(step_tokens=8)
    prompt = list(range(40))
    first = kit.send(prompt, 3)
    second = kit.send(prompt, 3)
    kit.step(2)
    assert kit.scheduler.find(second).status is TurnStatus.WAITING  # type: ignore[union-attr]
    kit.cancel(first)
    kit.run()
    assert kit.outcomes[first].finish_reason is FinishReason.CANCELLED
    receipt = kit.outcomes[second].receipt
    assert receipt.cached == 16  # what the first had fed
    assert kit.outcomes[second].tokens == greedy(kit.model, prompt, 3, kit.outcomes[second].tokens)


def test_who_waits_for_a_prefix_does_not_hold_up_others() -> None:
    kit = Kit(step_tokens=16)
    prompt = list(range(60))
    kit.send(prompt, 1)
    waiting = kit.send(prompt, 1)
    kit.step()
    other = kit.send([200, 201], 1)
    kit.scheduler._max_step_tokens = 20
    kit.step()
    assert kit.scheduler.find(waiting) is not None
    kit.run()
    order = list(kit.outcomes)
    assert order.index(other) < order.index(waiting)


# -- fairness -------------------------------------------------------------------------------------------------------


def test_a_tenant_with_a_long_queue_does_not_keep_another_waiting() -> None:
    kit = Kit(max_running=2, step_tokens=16)
    for i in range(20):
        kit.send([i, 1, 2, 3], 4, tenant="crowd")
    kit.step(10)
    late = kit.send([99, 98], 4, tenant="late")
    ended = 0
    while kit.outcomes[late].finish_reason is None:
        kit.step()
        ended += 1
    assert ended <= 10  # as soon as a place is free, not after 20 others
    kit.run()


def test_two_tenants_share_prefill_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(max_running=4, step_tokens=8)
    plans = watch_plans(kit, monkeypatch)
    rng = random.Random(2)
    tenants = {}
    for i in range(16):
        tenant = "a" if i < 12 else "b"
        tenants[kit.send([rng.randrange(200) for _ in range(30)], 1, tenant=tenant)] = tenant
    kit.step(24)
    fed = {"a": 0, "b": 0}
    for plan in plans:
        for turn, count in plan.items():
            fed[tenants[turn]] += count
    assert abs(fed["a"] - fed["b"]) <= 60
    kit.run()


# -- preemption -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_pages", [0, 4, 40])
def test_turns_that_do_not_fit_together_all_end_right(host_pages: int) -> None:
    kit = Kit(pages=9, host_pages=host_pages, step_tokens=8, context=32)
    prompts = [[i * 10 + j for j in range(4 + i)] for i in range(5)]
    turns = [kit.send(prompt, 18) for prompt in prompts]
    kit.run(limit=3000)
    assert kit.scheduler.preemptions > 0
    for turn, prompt in zip(turns, prompts, strict=True):
        assert kit.outcomes[turn].tokens == greedy(kit.model, prompt, 18, kit.outcomes[turn].tokens)
        assert kit.outcomes[turn].finish_reason is FinishReason.LENGTH


def test_a_preempted_turn_keeps_its_place_and_its_first_receipt() -> None:
    kit = Kit(pages=6, step_tokens=8, context=20)
    first = kit.send([1, 2, 3], 15)
    second = kit.send([11, 12, 13], 15)
    third = kit.send([21, 22, 23], 2)
    kit.run(limit=1000)
    assert kit.scheduler.preemptions > 0
    for turn in (first, second, third):
        assert [delta.receipt is not None for delta in kit.outcomes[turn].deltas].count(True) == 1
        receipt = kit.outcomes[turn].receipt
        assert (receipt.prompt, receipt.cached) == (3, 0)
    ends = [turn for turn in kit.outcomes if kit.outcomes[turn].finish_reason is FinishReason.LENGTH]
    assert len(ends) == 3


def test_a_session_name_stays_busy_while_its_turn_is_preempted() -> None:
    kit = Kit(pages=6, step_tokens=8, context=20)
    kit.send([1, 2, 3], 15)
    second = kit.send([11, 12, 13], 15, session="s")
    while not kit.scheduler.preemptions:
        kit.step()
    assert kit.scheduler.find(second).status is TurnStatus.WAITING  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="session_busy"):
        kit.send([11], 1, session="s")
    kit.run(limit=1000)
    assert kit.outcomes[second].tokens == greedy(kit.model, [11, 12, 13], 15, kit.outcomes[second].tokens)


def test_the_longest_turn_that_is_accepted_runs_in_the_smallest_memory() -> None:
    kit = Kit(pages=4, step_tokens=5)
    prompt = list(range(9))
    kit.ask_checked(prompt, 3)
    edited = [*range(6), 77, 78, 79]
    assert kit.ask(edited, 3).tokens == greedy(kit.model, edited, 3)
    with pytest.raises(ValueError, match="context_length_exceeded"):
        kit.send(list(range(10)), 3)
