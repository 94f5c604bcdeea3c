"""Interceptors: while a module is recorded, calls of its linear modules, experts and attention are recorded as one
operation each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from cache.attention.packed_attention import PackedAttention
from cache.pages.packed import PackedCache
from scheduler.accel.cpu.experts import PackedExperts
from scheduler.accel.cpu.matrix import Matrix
from scheduler.accel.cpu.recorder import Recorder, Unrecordable


@dataclass
class AttentionRequest:
    """A recorded call of attention: the module, its layer, and the options other than query, key and value."""

    module: torch.nn.Module
    layer: int
    options: dict[str, Any]
    given: list[torch.Tensor] = field(default_factory=list)
    out: torch.Tensor | None = None


@contextmanager
def forward_of(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within it, calls of the module run ``forward``; after it what they ran before."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@contextmanager
def intercept_product(
    recorder: Recorder, module: torch.nn.Module, matrix: Matrix, bias: torch.Tensor | None
) -> Iterator[None]:
    """Within it, calls of a linear module are recorded as one product with ``matrix`` and ``bias [out]``."""
    original = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        with recorder.paused():
            out: torch.Tensor = original(x)
            recorder.product(matrix, bias, x, out)
        return out

    with forward_of(module, forward):
        yield


@contextmanager
def refuse_linear(module: torch.nn.Module) -> Iterator[None]:
    """Within it, calls of a linear module whose weight torch reads faster raise Unrecordable."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        raise Unrecordable("a linear module that is not read here")

    with forward_of(module, forward):
        yield


@contextmanager
def intercept_experts(recorder: Recorder, module: torch.nn.Module, experts: PackedExperts) -> Iterator[None]:
    """Within it, calls of a module of experts are recorded as its products and what is between them."""
    original = module.forward

    def forward(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        with recorder.paused():
            out: torch.Tensor = original(hidden_states, top_k_index, top_k_weights)
        recorder.replace(out, experts.record(recorder, hidden_states, top_k_index, top_k_weights))
        return out

    with forward_of(module, forward):
        yield


@contextmanager
def intercept_attention(
    recorder: Recorder, attention: PackedAttention, cache: PackedCache, asked: list[AttentionRequest]
) -> Iterator[None]:
    """Within it, an update of the cache and the attention after it are recorded as one call between two blocks. Asking
    for the length of the cache raises Unrecordable, since the answer would become part of the program.
    """
    updated: list[tuple[torch.Tensor, torch.Tensor, int]] = []
    update, attend = cache.update, attention.attend

    def watched_update(key: torch.Tensor, value: torch.Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
        with recorder.paused():
            out = update(key, value, layer, *args, **kwargs)
        if out[0] is not key or out[1] is not value:
            raise Unrecordable("keys are worked on after they are stored")
        updated.append((key, value, layer))
        return out

    def watched(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        if not updated or updated[-1][0] is not key or updated[-1][1] is not value or len(updated) != len(asked) + 1:
            raise Unrecordable("attention to what another layer stored")
        with recorder.paused():
            out = attend(module, query, key, value, **options)
            recorder.attend([query, key, value], out)
        if any(
            isinstance(option, torch.Tensor) and type(option) is not torch.nn.Parameter for option in options.values()
        ):
            raise Unrecordable("attention with a tensor of this step")
        asked.append(AttentionRequest(module, updated[-1][2], options, [query, key, value], out))
        return out

    def length() -> torch.Tensor:
        raise Unrecordable("it asks for the length of the cache")

    cache.update, attention.attend = watched_update, watched  # type: ignore[method-assign, assignment]
    cache.step.offsets = length  # type: ignore[method-assign]
    try:
        yield
    finally:
        del cache.update, attention.attend, cache.step.offsets
