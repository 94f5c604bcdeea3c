"""The interface of attention backends: ``Signature``, ``Plan`` and ``Backend``. ``cache.attention.backends`` lists the
backends of a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from cache.memory.memory_tier import PageShape
from cache.pages.layers import AttentionLayer, Reach, ScoreOptions
from cache.pages.packed import PackedStep

T = TypeVar("T")
P = TypeVar("P", bound="Plan")


class Signature(NamedTuple):
    """What decides whether a backend can be used: shape and dtype of pages and queries, and how scores are computed."""

    shape: PageShape
    heads: int  # of the queries
    dim: int  # of the queries
    dtype: torch.dtype  # of the queries
    capped: bool  # a soft cap on the scores
    sinks: bool
    chunked: bool  # a query sees its own chunk only

    @classmethod
    def of(cls, shape: PageShape, query: torch.Tensor, scores: ScoreOptions, layer: AttentionLayer) -> Signature:
        """The signature of ``query [H, T, D]`` over pages of ``shape`` in ``layer``."""
        heads, _, dim = query.shape
        capped, sinks = scores.softcap is not None, scores.sinks is not None
        return cls(shape, heads, dim, query.dtype, capped, sinks, layer.reach is Reach.CHUNKED)


class Plan(Protocol):
    """What a backend has prepared for the spans of one step that it takes. Valid during that step."""

    @property
    def unhandled(self) -> frozenset[int]:
        """The numbers of the spans that the backend leaves to the next one."""


class Backend(Protocol[P]):
    """An implementation of attention over the pages of a step, used where it fits."""

    def fits(self, signature: Signature) -> bool:
        """Whether the backend supports this signature and its self-test passed for it."""

    def plan(self, step: PackedStep, layer: AttentionLayer, spans: frozenset[int], last: bool) -> P | None:
        """The plan for those of ``spans`` that the backend takes, in layers of the same kind as ``layer``; made once
        per step. None if it takes none. ``last``: no other backend is tried for the spans that it leaves.
        """

    def attend(
        self,
        plan: P,
        step: PackedStep,
        layer: AttentionLayer,
        source: int,
        query: torch.Tensor,
        scores: ScoreOptions,
        out: torch.Tensor,
    ) -> None:
        """Attention of ``query [H, T, D]`` over the pages of layer ``source``, for the rows of the plan's spans,
        written to the same rows of ``out [T, H, Dv]`` (contiguous, dtype of ``query``). The caller has checked
        ``fits``.
        """


def once(step: PackedStep, key: Any, make: Callable[[], T]) -> T:
    """The value in ``step.plans`` under ``key``; ``make`` is called if there is none yet."""
    try:
        made: T = step.plans[key]
    except KeyError:
        made = step.plans[key] = make()
    return made
