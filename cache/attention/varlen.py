"""The attention backend that calls torch's ``varlen_attn`` (flash attention) on GPUs: one call per layer for all long
spans of a step. On Hopper it is FlashAttention 3 where that is installed.

Keys and values are gathered from their pages first: torch takes page tables from 2.12 on, and only with pages of at
least 256 tokens. The copy is cheap next to the attention of a long span.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.attention

from cache.attention import self_test
from cache.attention.backend import Signature, once
from cache.attention.self_test import SelfTest, StepSpec
from cache.error_line import first_line
from cache.memory.memory_tier import PageShape
from cache.memory.stream import put
from cache.pages.layers import AttentionLayer, ScoreOptions
from cache.pages.packed import PackedStep

log = logging.getLogger("warmturn.engine")

LONG = 128  # tokens of a span from which on this is the faster way
_WIDEST = 256  # numbers of a head
_FLASH_3 = 9  # the compute capability of the chips that FlashAttention 3 is for
_USUAL = [  # what FlashAttention 3 must be right for, or torch's own kernels are used
    Signature(PageShape(8, 128, 8, 128, dtype), 32, 128, dtype, False, sinks, False)
    for dtype in (torch.bfloat16, torch.float16)
    for sinks in (False, True)
]


class VarlenPlan:
    """The tensors with which ``varlen_attn`` is called for the spans ``numbers`` of a step, in layers of one kind.
    Valid during that step.

    ``rows [rows]`` are their rows in the step, and ``places [keys]`` the slot * page_size + offset of their keys, span
    after span, both int64. ``rest`` are the spans that it leaves.
    """

    def __init__(
        self, step: PackedStep, layer: AttentionLayer, numbers: frozenset[int], rest: frozenset[int] = frozenset()
    ) -> None:
        self.unhandled = rest
        chosen = [step.spans[number] for number in sorted(numbers)]
        firsts = [layer.first_key(span.start) for span in chosen]
        sizes = [span.size for span in chosen]
        keys = [span.stop - first for span, first in zip(chosen, firsts, strict=True)]
        device = step.tier.device
        ends = put(np.array([np.cumsum([0, *sizes]), np.cumsum([0, *keys])], np.int32), device)
        self.query_ends, self.key_ends = ends[0], ends[1]
        self.longest, self.longest_keys = max(sizes), max(keys)
        self.places = put(
            np.concatenate([step.places(s, f, layer) for s, f in zip(chosen, firsts, strict=True)]), device
        )
        self.rows = put(np.concatenate([np.arange(s.row, s.row + s.size) for s in chosen]), device)
        # Aligned to the last key: a query sees the keys up to its own, and in a window the last of them.
        self.window = (-1, 0) if layer.window is None else (layer.window - 1, 0)


class VarlenBackend:
    """torch's ``varlen_attn`` on one device."""

    def __init__(self, device: torch.device, function: Callable[..., Any]) -> None:
        self._function = function
        self._options = {"enable_gqa": True} if "enable_gqa" in inspect.signature(function).parameters else {}
        self._self_test = SelfTest(self, "varlen_attn", device, _trial_steps)

    def fits(self, signature: Signature) -> bool:
        shape, dtype, dim = signature.shape, signature.dtype, signature.dim
        if dtype is not shape.dtype or dtype not in (torch.bfloat16, torch.float16) or signature.chunked:
            return False
        if not dim == shape.key_dim == shape.value_dim or dim % 8 or dim > _WIDEST or signature.capped:
            return False
        if shape.key_heads != shape.value_heads or signature.heads % shape.key_heads:
            return False
        return self._self_test.passes(signature)

    def plan(self, step: PackedStep, layer: AttentionLayer, spans: frozenset[int], last: bool) -> VarlenPlan | None:
        """For spans without hidden tokens: the long ones of these, or all if this is the ``last`` backend."""

        def make() -> VarlenPlan | None:
            seen = (number for number in spans if not step.spans[number].session.hidden)
            numbers = frozenset(number for number in seen if last or step.spans[number].size >= LONG)
            return VarlenPlan(step, layer, numbers, spans - numbers) if numbers else None

        return once(step, (VarlenPlan, layer.kind, spans, last), make)

    def attend(
        self,
        plan: VarlenPlan,
        step: PackedStep,
        layer: AttentionLayer,
        source: int,
        query: torch.Tensor,
        scores: ScoreOptions,
        out: torch.Tensor,
    ) -> None:
        from torch.nn.attention.varlen import AuxRequest

        keys, values = step.tier.tokens(source, plan.places)
        whole = len(plan.rows) == step.tokens
        rows = (query if query.stride(2) == 1 else query.contiguous()).transpose(0, 1)
        found, sums = self._function(
            rows if whole else rows[plan.rows],
            keys,
            values,
            plan.query_ends,
            plan.key_ends,
            plan.longest,
            plan.longest_keys,
            return_aux=AuxRequest(lse=True),
            scale=scores.scale,
            window_size=plan.window,
            **self._options,
        )
        if scores.sinks is not None:  # one more weight in the sum, with no value
            found = found * torch.sigmoid(sums - scores.sinks.float()[:, None]).T[..., None].to(found.dtype)
        out.index_copy_(0, plan.rows, found)


def _trial_steps(signature: Signature) -> Iterator[StepSpec]:
    """The steps of the self-test without hidden tokens."""
    return (StepSpec(sessions, False) for sessions in self_test.SESSIONS)


@cache
def varlen_backend(device: torch.device) -> VarlenBackend | None:
    """The backend for ``device``; None if this torch or this device has no ``varlen_attn``."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if _activate_flash_3(device):
        backend = VarlenBackend(device, varlen_attn)
        if all(backend.fits(signature) for signature in _USUAL):
            log.info("attention of long spans uses FlashAttention 3")
            return backend
        torch.nn.attention.restore_flash_attention_impl()
        log.info("FlashAttention 3 is installed, and not used: its results are wrong here")
    return VarlenBackend(device, varlen_attn)


def _activate_flash_3(device: torch.device) -> bool:
    """Let torch call FlashAttention 3, where its package ``flash_attn_interface`` is installed and the chip is one that
    it is for; whether torch does. See ``torch.nn.attention.activate_flash_attention_impl``, of torch 2.11 and later.
    """
    if torch.cuda.get_device_capability(device)[0] != _FLASH_3:
        return False
    try:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    except Exception as error:  # whatever the package or torch raises
        log.debug("FlashAttention 3 is not used: %s", first_line(error, 160))
        return False
    return True
