"""Which is faster for long spans on this machine, the compiled kernel or torch: timed once for each shape of pages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from cache.attention.self_test import LAYERS, StepSpec, random_step
from cache.attention.torch_attention import attend
from cache.memory.memory_tier import PageShape
from cache.pages.layers import ScoreOptions
from cache.pages.packed import PackedStep

log = logging.getLogger("warmturn.engine")

_SPEC = StepSpec(((384, 128),), False)
_GROUP = 2  # query heads for each key head
_ROUNDS = 3
_WORTH = 0.9  # torch must take at most so much of the kernel's time: between two that are alike nothing changes

Kernel = Callable[[PackedStep, torch.Tensor, ScoreOptions, torch.Tensor], None]


def kernel_is_faster(shape: PageShape, kernel: Kernel) -> bool:
    """Whether ``kernel`` is to be used for long spans over pages of ``shape``.

    It is called with a step, queries ``[H, T, D]``, options and a place for the result, ``[T, H, Dv]``, and attends to
    layer 0.
    """
    random = torch.Generator().manual_seed(0)
    step = random_step(_SPEC, torch.device("cpu"), shape, random)
    heads, span, layer = _GROUP * shape.key_heads, step.spans[0], LAYERS[0]
    query = torch.randn(heads, span.size, shape.key_dim, generator=random).to(shape.dtype)
    out = query.new_empty(span.size, heads, shape.value_dim)
    scores = ScoreOptions(shape.key_dim**-0.5, None, None)

    def by_torch() -> None:
        keys, values = (part[: span.stop] for part in step.tier.read(0, step.pages(span, layer)))
        out.copy_(attend(query, keys, values, step.mask(0, layer, 0), *scores).transpose(0, 1))

    ours, theirs = float("inf"), float("inf")
    for _ in range(_ROUNDS):
        ours = min(ours, _seconds(lambda: kernel(step, query, scores, out)))
        theirs = min(theirs, _seconds(by_torch))
    faster = theirs > _WORTH * ours
    log.debug("long spans over %s: the kernel takes %.1f ms, torch %.1f", shape, 1e3 * ours, 1e3 * theirs)
    return faster


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
