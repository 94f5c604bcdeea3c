"""Which is better for long spans on this machine, the compiled kernel or torch: timed once for each shape of pages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from cache.attention.self_test import LAYERS, StepSpec, random_step
from cache.attention.torch_attention import attend
from cache.error_line import first_line
from cache.memory.memory_tier import PageShape
from cache.pages.layers import ScoreOptions
from cache.pages.packed import PackedStep

log = logging.getLogger("warmturn.engine")

_SPEC = StepSpec(((384, 128),), False)
_GROUP = 2  # query heads for each key head
_ROUNDS = 3
_WORTH = 0.9  # torch must take at most so much of the kernel's time: a span that is left to it ends a chain of layers

Kernel = Callable[[PackedStep, torch.Tensor, ScoreOptions, torch.Tensor], None]


def kernel_is_faster(shape: PageShape, kernel: Kernel) -> bool:
    """Whether ``kernel`` is to be used for long spans over pages of ``shape``: unless torch is clearly faster, or it
    fails.

    It is called with a step, queries ``[H, T, D]``, options and a place for the result, ``[T, H, Dv]``, and attends to
    layer 0.
    """
    try:
        ours, theirs = _both(shape, kernel)
    except Exception as error:  # whatever there is no memory for
        log.info("long spans over %s are torch's: %s", shape, first_line(error, 160))
        return False
    log.debug("long spans over %s: the kernel takes %.1f ms, torch %.1f", shape, 1e3 * ours, 1e3 * theirs)
    return theirs > _WORTH * ours


def _both(shape: PageShape, kernel: Kernel) -> tuple[float, float]:
    """The seconds that the kernel takes, and torch: the best of some turns."""
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
    return ours, theirs


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
