"""What routers chose in one forward is chosen in another one, for the same tokens."""

from __future__ import annotations

from typing import Any

import torch

from scheduler.expert_choices import ExpertChoices

TOKENS, EXPERTS, CHOSEN = 6, 8, 2


def route(numbers: torch.Tensor, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = torch.topk(numbers, CHOSEN, **how)
    return values, indices


def noted() -> tuple[ExpertChoices, list[list[torch.Tensor]]]:
    """The choices of two layers in forwards of two timelines, and what these were."""
    choices, made = ExpertChoices(), []
    for _ in range(2):
        with choices.noted(TOKENS):
            made.append([route(torch.randn(TOKENS, EXPERTS), dim=-1)[1] for _ in range(2)])
    return choices, made


def test_tokens_get_what_was_chosen_for_them() -> None:
    choices, made = noted()
    assert choices
    with choices.repeated([(1, 2, 5), (0, 0, 1)]):
        for layer in range(2):
            numbers = torch.randn(1, 4, EXPERTS)
            values, indices = numbers.topk(CHOSEN, sorted=False)
            want = torch.cat([made[1][layer][2:5], made[0][layer][:1]])
            assert torch.equal(indices[0], want)
            assert torch.equal(values, numbers.gather(-1, indices))


def test_groups_of_experts_too() -> None:
    choices, numbers = ExpertChoices(), torch.randn(TOKENS, 3, EXPERTS)
    with choices.noted(TOKENS):
        _, made = route(numbers)
    with choices.repeated([(0, 1, 3)]):
        assert torch.equal(route(-numbers[1:3])[1], made[1:3])


def test_what_does_not_begin_with_the_tokens_is_left_alone() -> None:
    """Heads of sparse attention that choose keys, and blocks of them."""
    choices, by_head, keys = ExpertChoices(), torch.randn(1, 3, TOKENS, EXPERTS), torch.randn(TOKENS, TOKENS)
    with choices.noted(TOKENS):
        route(by_head)
        route(keys)
    assert not choices
    with choices.repeated([(0, 5, 6)]):
        assert torch.equal(route(-by_head[:, :, 5:])[1], (-by_head[:, :, 5:]).topk(CHOSEN).indices)
        assert torch.equal(route(-keys[5:])[1], (-keys[5:]).topk(CHOSEN).indices)


def test_what_is_something_else_is_left_alone() -> None:
    choices, _ = noted()
    with choices.repeated([(0, 0, 3)]):
        few, other, least = torch.randn(2, EXPERTS), torch.randn(3, EXPERTS + 1), torch.randn(3, EXPERTS)
        assert torch.equal(route(few)[1], few.sort(descending=True).indices[:, :CHOSEN])
        assert torch.equal(route(other)[1], other.sort(descending=True).indices[:, :CHOSEN])
        assert torch.equal(route(least, largest=False)[1], least.sort().indices[:, :CHOSEN])
    with choices.repeated([(0, 0, 3)]):
        for _ in range(2):
            route(least)
        third = torch.randn(3, EXPERTS)  # more often than it was noted
        assert torch.equal(route(third)[1], third.sort(descending=True).indices[:, :CHOSEN])
    assert not ExpertChoices()
