"""Log-probabilities of prompts and replies, against ``log_softmax`` of from-scratch forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_kit import Kit, Outcome
from tiny_models import greedy, logits


def check_prompt_logprobs(kit: Kit, prompt: list[int], outcome: Outcome, top: int) -> None:
    """Against ``log_softmax`` of a from-scratch forward."""
    got = [item for delta in outcome.deltas for item in delta.prompt_logprobs]
    assert [item.token_id for item in got] == prompt
    assert got[0].logprob is None
    want = torch.log_softmax(logits(kit.model, prompt), -1)
    for at, item in enumerate(got[1:]):
        assert item.logprob == pytest.approx(float(want[at, prompt[at + 1]]), abs=1e-3)
        best, _ = want[at].topk(top)
        assert [value for _, _, _, value in item.top] == pytest.approx(best.tolist(), abs=1e-3)


@pytest.mark.parametrize("step_tokens", [5, 64])
@pytest.mark.parametrize(("count", "top"), [(0, 2), (3, 0)])
def test_prompt_logprobs(step_tokens: int, count: int, top: int) -> None:
    kit = Kit(step_tokens=step_tokens)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
    kit.ask(prompt, 2)  # cached already: computed again, since the logits are wanted
    outcome = kit.ask(prompt, count, prompt_logprobs=top)
    check_prompt_logprobs(kit, prompt, outcome, top)
    assert outcome.receipt.cached == 0
    assert outcome.tokens == greedy(kit.model, prompt, count, outcome.tokens)


def test_prompt_logprobs_of_one_token() -> None:
    kit = Kit()
    check_prompt_logprobs(kit, [65], kit.ask([65], 1, prompt_logprobs=1), 1)


def test_prompt_logprobs_beside_other_turns() -> None:
    kit = Kit(step_tokens=12)
    prompts = [[7, 8, 9, 10, 11, 12, 13, 14, 15], [1, 2], list(range(30, 60))]
    turns = [
        kit.send(prompts[0], 3, prompt_logprobs=1),
        kit.send(prompts[1], 8),
        kit.send(prompts[2], 2, prompt_logprobs=3),
    ]
    kit.run()
    check_prompt_logprobs(kit, prompts[0], kit.outcomes[turns[0]], 1)
    check_prompt_logprobs(kit, prompts[2], kit.outcomes[turns[2]], 3)
    for turn, prompt, count in zip(turns, prompts, (3, 8, 2), strict=True):
        assert kit.outcomes[turn].tokens == greedy(kit.model, prompt, count, kit.outcomes[turn].tokens)


def test_prompt_logprobs_of_a_turn_preempted_while_prefilling() -> None:
    kit = Kit(pages=12, step_tokens=4)
    kit.send([1, 2, 3], 24)
    prompt = list(range(100, 136))
    turn = kit.send(prompt, 2, prompt_logprobs=1)
    kit.run()
    assert kit.scheduler.preemptions == 1
    check_prompt_logprobs(kit, prompt, kit.outcomes[turn], 1)


def test_a_preempted_turn_reuses_its_kv_once_its_prompt_logprobs_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    kit = Kit(pages=6, host_pages=20, step_tokens=8, context=20)
    fed = 0
    run = kit.runner.run

    def watch(work: Any, rows: Any, **options: Any) -> torch.Tensor:
        nonlocal fed
        fed += sum(count for _, count in work)
        return run(work, rows, **options)

    monkeypatch.setattr(kit.runner, "run", watch)
    kit.send([1, 2, 3], 15)
    turn = kit.send([11, 12, 13], 15, prompt_logprobs=0)
    kit.run()
    assert kit.scheduler.preemptions > 0
    assert kit.outcomes[turn].tokens == greedy(kit.model, [11, 12, 13], 15, kit.outcomes[turn].tokens)
    assert fed <= 2 * (3 + 14) + kit.scheduler.preemptions


def test_logprobs_of_generated_tokens() -> None:
    kit = Kit()
    prompt = [10, 20, 30]
    outcome = kit.ask(prompt, 6, logprobs=3)
    want = torch.log_softmax(logits(kit.model, [*prompt, *outcome.tokens]), -1)[2:]
    told = [item for delta in outcome.deltas for item in delta.logprobs]
    assert [item.token_id for item in told] == outcome.tokens
    for at, item in enumerate(told):
        assert item.logprob == pytest.approx(float(want[at, item.token_id]), abs=1e-3)
        assert item.top[0][0] == item.token_id  # greedy
        assert len(item.top) == 3
        assert item.data == (bytes([item.token_id]) if item.token_id < 256 else item.text.encode())
