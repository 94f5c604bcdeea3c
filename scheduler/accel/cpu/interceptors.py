"""Interceptors: while a module is recorded, calls of its linear modules and experts are recorded as one operation each.
Those of attention: ``scheduler.accel.cpu.attention_interceptor``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from cache.attention.absorbed import Absorbed
from cache.attention.packed_attention import PackedAttention
from cache.pages.layers import ScoreOptions
from scheduler.accel.cpu.experts import PackedExperts
from scheduler.accel.cpu.matrix import Matrix
from scheduler.accel.cpu.recorder import Recorder, Unrecordable


@dataclass
class AttentionRequest:
    """A recorded call of attention: the module, its layer, and the options other than query, key and value.
    ``absorbed``: if it attends to rows of latents, with queries that were made for these. ``stores``: whether the
    module stores keys and values; else it attends to those that another one has stored.
    """

    module: torch.nn.Module
    layer: int
    options: dict[str, Any]
    given: list[torch.Tensor] = field(default_factory=list)
    out: torch.Tensor | None = None
    absorbed: Absorbed | None = None
    stores: bool = True

    @property
    def signature(self) -> Any:
        """A value that is equal for two recordings of the same request."""
        return self.layer, self.stores, sorted(self.options)

    @property
    def scores(self) -> ScoreOptions:
        """How scores are computed."""
        sinks = PackedAttention.sinks(self.module, self.options["s_aux"])
        return ScoreOptions(self.options["scaling"], self.options["softcap"], sinks)


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
            if recorder.is_idle(x):
                recorder.let_idle(out)
            else:
                recorder.product(matrix, bias, x, out)
        return out

    with forward_of(module, forward):
        yield


@contextmanager
def refuse_linear(recorder: Recorder, module: torch.nn.Module) -> Iterator[None]:
    """Within it, calls of a linear module whose weight torch reads faster raise Unrecordable, unless nothing may depend
    on them.
    """
    original = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not recorder.is_idle(x):
            raise Unrecordable("a linear module that is not read here")
        with recorder.paused():
            out: torch.Tensor = original(x)
            recorder.let_idle(out)
        return out

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
