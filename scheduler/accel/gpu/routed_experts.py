"""Experts whose packed weights stay packed on a GPU: a function for transformers' registry of experts functions.

Rows are put in tiles by their experts on the device, so a step can be captured; many rows outside of a capture are
multiplied expert by expert, each weight decoded once, of those experts only that some row has.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from scheduler.accel.cpu.experts import LARGE, serves, some_experts
from scheduler.accel.gpu.captured_experts import waitless_forward
from scheduler.accel.gpu.device_weight import DeviceWeight, device_weight_of
from scheduler.accel.gpu.packed_product import multiply_routed, waits
from scheduler.weights.quantised_weight import quantised_weight_of

_NAME = "warmturn packed over "  # followed by the name of the function that serves modules that are not packed
_CHECKED, _TOKENS, _CHOICES = 3, 6, 2  # experts of each module, made-up tokens and their experts
_MOST_ERROR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}  # root mean square
_PACKED = "packed_weights"


class RoutedTrial:
    """What a module's own code, the eager one, says with some of its experts unpacked."""

    def __init__(self, module: Any, device: torch.device) -> None:
        """Before the weights are moved to ``device``, where the module's other parameters are."""
        count, dtype = len(module.down_proj), module.down_proj.dtype
        inside = module.down_proj.shape[2 if module.is_transposed else 1]
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(_TOKENS, inside, generator=generator).to(device, dtype)
        hidden[-1] *= LARGE  # where a gate clamps
        some = torch.linspace(0, count - 1, min(_CHECKED, count)).long()
        scores = torch.rand(_TOKENS, len(some), generator=generator)
        weights, places = (one.to(device) for one in scores.topk(min(_CHOICES, len(some))))
        weights = weights.to(dtype)
        few = some_experts(module, some)
        few._parameters = {name: torch.nn.Parameter(one.to(device), False) for name, one in few._parameters.items()}
        self._want = type(module).forward.__wrapped__(few, hidden, places, weights)
        self._given = hidden, some.to(device)[places], weights

    def passes(self, module: Any) -> bool:
        """Whether the module says so with its packed weights."""
        got, want = _forward("eager", module, *self._given).float(), self._want.float()
        return bool((got - want).norm() <= _MOST_ERROR[self._want.dtype] * want.norm())


def is_routed(module: Any) -> bool:
    """Whether a module is one of experts as the registry serves them, with packed weights of a checkpoint."""
    return serves(module) and quantised_weight_of(module.down_proj) is not None


def hold(module: Any, weights: dict[str, DeviceWeight]) -> None:
    """Give a module of experts its packed weights, by the names of the parameters that stand for them."""
    setattr(module, _PACKED, weights)


def drop(module: Any) -> None:
    """Take them away."""
    delattr(module, _PACKED)


def route_experts(model: Any) -> None:
    """Let the modules of experts that have packed weights compute with them."""
    found = {module.config._experts_implementation for module in model.modules() if hasattr(module, _PACKED)}
    for own in found:
        ALL_EXPERTS_FUNCTIONS.register(_NAME + own, partial(_forward, own))
        model.set_experts_implementation(_NAME + own)


def _forward(
    own: str, module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The entry of transformers' registry. ``own``: the entry that modules have that are not packed."""
    packed = _weights_of(module)
    if packed is None:
        plain = ALL_EXPERTS_FUNCTIONS.get_interface(own, type(module).forward.__wrapped__)
        serve = plain if waits() else waitless_forward
        served: torch.Tensor = serve(module, hidden_states, top_k_index, top_k_weights)
        return served
    chosen = top_k_index.reshape(-1)
    inner = _product(module, packed, "gate_up_proj" if module.has_gate else "up_proj", hidden_states, chosen)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outer = _product(module, packed, "down_proj", inner, chosen)
    if module.has_post_expert_norm:
        outer = module.post_expert_norm(outer)
    weighted = outer * top_k_weights.reshape(-1, 1)
    return weighted.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)


def _weights_of(module: Any) -> dict[str, DeviceWeight] | None:
    """The packed weights of a module, None if they are plain. Another module with the same parameters, as a model's
    twin has, gets them when it is first asked.
    """
    found: dict[str, DeviceWeight] | None = getattr(module, _PACKED, None)
    if found is None and device_weight_of(module.down_proj) is not None:
        each = {name: device_weight_of(one) for name, one in module._parameters.items()}
        found = {name: weight for name, weight in each.items() if weight is not None}
        hold(module, found)
    return found


def _product(
    module: Any, packed: dict[str, DeviceWeight], name: str, rows: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """``[n * k, out]``: ``rows``, of tokens or of each of their choices, by the chosen experts, with their bias."""
    weight = packed[name]
    found = multiply_routed(rows, chosen, weight.parts, weight.form)
    return found + getattr(module, f"{name}_bias")[chosen] if module.has_bias else found
