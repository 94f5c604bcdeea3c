"""Experts that transformers' model of an architecture has in a form of its own, in the form that its registry of
experts functions serves: nothing else reads packed experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import use_experts_implementation


@use_experts_implementation
class RoutedExperts(nn.Module):
    """Experts as most models have them: gates and ups joined, matrices as ``[experts, out, in]``."""

    def __init__(self, config: Any, own: Any) -> None:
        """``own``: the model's module of experts."""
        super().__init__()
        self.num_experts = int(own.num_experts)
        inner = own.expert_dim if hasattr(own, "expert_dim") else own.ffn_hidden_size
        like = next(own.parameters())
        self.gate_up_proj = nn.Parameter(like.new_empty(self.num_experts, 2 * inner, own.hidden_size))
        self.down_proj = nn.Parameter(like.new_empty(self.num_experts, own.hidden_size, inner))
        self.act_fn = own.act_fn if hasattr(own, "act_fn") else own.mlp.activation_fn

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Tokens ``[T, hidden]`` through their experts ``[T, K]``, times the weights of these ``[T, K]``."""
        out = torch.zeros_like(hidden_states)
        for expert in sorted(set(top_k_index.flatten().tolist())):
            if expert >= self.num_experts:
                continue
            tokens, places = torch.where(top_k_index == expert)
            gate, up = nn.functional.linear(hidden_states[tokens], self.gate_up_proj[expert]).chunk(2, dim=-1)
            found = nn.functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
            out.index_add_(0, tokens, (found * top_k_weights[tokens, places, None]).to(out.dtype))
        return out


def _weigh_inputs(block: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of experts whose inputs are multiplied by their scores, beside one that all tokens have."""
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    _, scores = block.router(tokens)
    best, index = torch.topk(scores, block.top_k, dim=1)
    given = tokens[:, None] * torch.sigmoid(best.float()).to(tokens.dtype)[..., None]
    found = block.experts(given.flatten(0, 1), index.reshape(-1, 1), torch.ones_like(best).reshape(-1, 1))
    return block.shared_expert(tokens) + found.view(given.shape).sum(1), scores


def _flatten_tokens(block: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Of experts that take the tokens of all texts together."""
    weights, index = block.route_tokens_to_experts(block.router(hidden_states))
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    found: torch.Tensor = block.experts(tokens, index, weights)
    return found.view(hidden_states.shape)


# By GGUF's name of an architecture: what a block of experts computes.
_BLOCKS: dict[str, Callable[..., Any]] = {"dbrx": _flatten_tokens, "llama4": _weigh_inputs}


def route_experts(model: Any, architecture: str) -> None:
    """Give the blocks of ``model`` experts of that form, if those of its architecture have another one, and those of
    all models that are made by its class from now on.
    """
    forward = _BLOCKS.get(architecture)
    if forward is None:
        return
    plain = type(model)

    def make(self: Any, config: Any, *given: Any, **options: Any) -> None:
        plain.__init__(self, config, *given, **options)
        _replace(self, forward)

    about = {"__init__": make, "__module__": plain.__module__, "_can_set_experts_implementation_cached_value": True}
    model.__class__ = type(plain.__name__, (plain,), about)
    _replace(model, forward)


def _replace(model: Any, forward: Callable[..., Any]) -> None:
    for block in list(model.modules()):
        own = block._modules.get("experts")
        if own is not None and not isinstance(own, RoutedExperts):
            block.experts = RoutedExperts(model.config, own)
            block.__class__ = type(type(block).__name__, (type(block),), {"forward": forward})
