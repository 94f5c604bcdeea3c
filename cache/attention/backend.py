"""The interface of attention backends: ``Signature``, ``Plan`` and ``Backend``. ``cache.attention.backends`` lists the
backends of a device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from cache.memory.tier import PageShape
from cache.pages.layers import AttentionLayer, Reach, ScoreOptions
from cache.pages.packed import PackedStep

T = TypeVar("T")
P = TypeVar("P", bound="Plan")


class Signature(NamedTuple):
    """All that decides whether a backend can attend: the pages, the queries, and how scores become weights."""

    shape: PageShape
    heads: int  # of the queries
    dim: int  # of the queries
    dtype: torch.dtype  # of the queries
    capped: bool  # a soft cap on the scores
    sinks: bool
    chunked: bool  # a query sees its own chunk only

    @classmethod
    def of(cls, shape: PageShape, query: torch.Tensor, scores: ScoreOptions, layer: AttentionLayer) -> Signature:
        """That of ``query [H, T, D]`` over pages of ``shape`` in ``layer``."""
        heads, _, dim = query.shape
        capped, sinks = scores.softcap is not None, scores.sinks is not None
        return cls(shape, heads, dim, query.dtype, capped, sinks, layer.reach is Reach.CHUNKED)


class Plan(Protocol):
    """What a backend must know of the spans that it takes of one step. Valid as long as the step."""

    @property
    def rest(self) -> frozenset[int]:
        """The numbers of the spans that it leaves to others."""


class Backend(Protocol[P]):
    """A way to attend over the pages of a step, used where it fits."""

    def fits(self, signature: Signature) -> bool:
        """Whether it can attend, and was seen to do so right."""

    def plan(self, step: PackedStep, layer: AttentionLayer, spans: frozenset[int], last: bool) -> P | None:
        """How to attend in layers like ``layer`` to those of these spans that it is for, made once a step; None
        where it is for none. ``last``: no other backend is asked for those that it leaves.
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
        into the same rows of ``out [T, H, Dv]`` (contiguous, dtype of ``query``). The caller has asked ``fits``.
        """


def once(step: PackedStep, key: Any, make: Callable[[], T]) -> T:
    """What belongs to ``step`` under ``key``, made when it is first asked for."""
    try:
        made: T = step.plans[key]
    except KeyError:
        made = step.plans[key] = make()
    return made
