"""Attention of long segments by torch's flash kernels: one call a layer for all segments that feed many tokens.

Their keys are gathered first: torch takes page tables from 2.12 on, and then only with pages of 256 tokens and more. It
is a copy of numbers with each of which the call does hundreds of operations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import numpy as np
import torch

from cache.attention.trial import LAYERS, right
from cache.memory.stream import put
from cache.memory.tier import PageShape
from cache.pages.layers import AttentionLayer, Reach, ScoreOptions
from cache.pages.packed import PackedStep

LONG = 128  # tokens of a segment from which on this is the faster way
_WIDEST = 256  # numbers of a head


class Plan:
    """What the call must know of the segments ``numbers`` of a step in layers of one kind. Valid as long as the step.

    ``rows`` of the step are theirs; ``places`` hold their keys, segment after segment, up to the last one each sees.
    """

    def __init__(self, step: PackedStep, layer: AttentionLayer, numbers: Collection[int]) -> None:
        chosen = [step.segments[number] for number in sorted(numbers)]
        firsts = [layer.first_key(segment.start) for segment in chosen]
        sizes = [segment.size for segment in chosen]
        keys = [segment.stop - first for segment, first in zip(chosen, firsts, strict=True)]
        device = step.tier.device
        ends = put(np.array([np.cumsum([0, *sizes]), np.cumsum([0, *keys])], np.int32), device)
        self.query_ends, self.key_ends = ends[0], ends[1]
        self.most, self.most_keys = max(sizes), max(keys)
        self.places = put(np.concatenate([step.places(s, f) for s, f in zip(chosen, firsts, strict=True)]), device)
        self.rows = put(np.concatenate([np.arange(s.row, s.row + s.size) for s in chosen]), device)
        # Aligned to the last key: a query sees the keys up to its own, and in a window the last of them.
        self.window = (-1, 0) if layer.window is None else (layer.window - 1, 0)


class Varlen:
    """torch's function on one device. Shapes that it has not computed before are compared with the definition first."""

    def __init__(self, device: torch.device, function: Callable[..., Any]) -> None:
        self._device = device
        self._function = function
        self._options = {"enable_gqa": True} if "enable_gqa" in inspect.signature(function).parameters else {}
        self._right: dict[tuple[Any, ...], bool] = {}

    def fits(
        self, shape: PageShape, heads: int, dim: int, dtype: torch.dtype, scores: ScoreOptions, layer: AttentionLayer
    ) -> bool:
        """Whether it can compute, and computes right, queries of so many heads over pages of ``shape``, where nothing
        is hidden.
        """
        if dtype is not shape.dtype or dtype not in (torch.bfloat16, torch.float16) or layer.reach is Reach.CHUNKED:
            return False
        if not dim == shape.key_dim == shape.value_dim or dim % 8 or dim > _WIDEST or scores.softcap is not None:
            return False
        if shape.key_heads != shape.value_heads or heads % shape.key_heads:
            return False
        kind = (shape, heads, scores.sinks is not None)
        if kind not in self._right:
            self._right[kind] = self._compare(*kind)
        return self._right[kind]

    def attend(
        self, plan: Plan, step: PackedStep, source: int, query: torch.Tensor, scores: ScoreOptions, out: torch.Tensor
    ) -> None:
        """Attention of ``query [H, T, D]`` over the pages of layer ``source``, for the rows of the plan's segments,
        into the same rows of ``out [T, H, Dv]``. The caller has asked ``fits``.
        """
        from torch.nn.attention.varlen import AuxRequest

        keys, values = (pool[source].flatten(0, 1)[plan.places] for pool in (step.tier.keys, step.tier.values))
        whole = len(plan.rows) == step.tokens
        rows = (query if query.stride(2) == 1 else query.contiguous()).transpose(0, 1)
        found, sums = self._function(
            rows if whole else rows[plan.rows],
            keys,
            values,
            plan.query_ends,
            plan.key_ends,
            plan.most,
            plan.most_keys,
            return_aux=AuxRequest(lse=True),
            scale=scores.scale,
            window_size=plan.window,
            **self._options,
        )
        if scores.sinks is not None:  # one more weight in the sum, with no value
            found = found * torch.sigmoid(sums - scores.sinks.float()[:, None]).T[..., None].to(found.dtype)
        out.index_copy_(0, plan.rows, found)

    def _compare(self, shape: PageShape, heads: int, sinks: bool) -> bool:
        """Whether it is right, on made-up steps of every kind that it is used for."""

        def attend(
            step: PackedStep, layer: AttentionLayer, query: torch.Tensor, scores: ScoreOptions, out: torch.Tensor
        ) -> None:
            self.attend(Plan(step, layer, range(len(step.segments))), step, 0, query, scores, out)

        layers = [layer for layer in LAYERS if layer.reach is not Reach.CHUNKED]
        return right("varlen_attn", attend, self._device, shape, heads, False, sinks, hidden=(False,), layers=layers)


@cache
def varlen(device: torch.device) -> Varlen | None:
    """torch's function for ``device``; None where this torch, or this device, has none."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return Varlen(device, varlen_attn)
