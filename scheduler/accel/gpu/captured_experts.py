"""Experts without waiting for the device, for steps that are captured.

transformers groups tokens by expert; except for bfloat16 on some GPUs torch then reads the sizes of the groups on the
host, which a CUDA graph cannot. Decode steps have few rows. So each row's own experts are gathered, or, where that
would read more than all experts once, all experts compute all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward

from scheduler.accel.gpu.packed_product import waitless_products

NAME = "warmturn_waitless"
_GROUPED = "grouped_mm"
_NATIVE = ((9, 0), (10, 0))  # compute capabilities with grouped products of bfloat16


def grouped_products_wait(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's grouped products read the sizes of groups on the host."""
    if device.type != "cuda" or dtype is not torch.bfloat16:
        return True
    return torch.cuda.get_device_capability(device) not in _NATIVE


@contextmanager
def waitless_experts(model: Any) -> Iterator[None]:
    """Within it the experts of ``model`` compute without waiting for the device."""
    changed = []
    if grouped_products_wait(model.device, model.dtype):
        configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "_is_expert_parallel")}
        changed = [config for config in configs.values() if config._experts_implementation == _GROUPED]
    for config in changed:
        config._experts_implementation = NAME
    try:
        with waitless_products():
            yield
    finally:
        for config in changed:
            config._experts_implementation = _GROUPED


def waitless_forward(experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The experts' forward, as transformers calls it: ``hidden [T, D]``, ``chosen`` and ``weights`` ``[T, k]``."""
    if chosen.numel() <= experts.num_experts:
        found: torch.Tensor = batched_mm_experts_forward(experts, hidden, chosen, weights)
        return found
    inner = _product(
        experts, hidden.expand(experts.num_experts, -1, -1), "gate_up_proj" if experts.has_gate else "up_proj"
    )
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    outer = _product(experts, inner, "down_proj")
    if experts.has_post_expert_norm:
        outer = experts.post_expert_norm(outer)
    share = weights.new_zeros(hidden.shape[0], experts.num_experts).scatter_add_(1, chosen, weights)
    # Sums in float32: experts that a row has not chosen add 0 to it.
    mixed = (outer.float() * share.T[..., None].float()).sum(0)
    return mixed.to(hidden.dtype)


def _product(experts: Any, rows: torch.Tensor, name: str) -> torch.Tensor:
    """``rows [experts, T, D]`` by the weights of that name, with their bias."""
    weight = getattr(experts, name)
    found = torch.bmm(rows, weight if experts.is_transposed else weight.transpose(1, 2))
    return found + getattr(experts, f"{name}_bias")[:, None] if experts.has_bias else found


ALL_EXPERTS_FUNCTIONS.register(NAME, waitless_forward)
