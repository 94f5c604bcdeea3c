"""``python triton_interpreted.py``: attention over pages by Triton's interpreter, against the definition in numpy;
prints the error of each case, one JSON object a line. Its bfloat16 is wrong, so it has none.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import numpy as np
import torch
from gpu_kit import near_step

from cache.attention.self_test import StepSpec, random_step
from cache.attention.triton import TritonBackend
from cache.memory.codec import Codec
from cache.memory.memory_tier import PageShape
from cache.pages.layers import AttentionLayer, Reach, ScoreOptions
from cache.pages.packed import PackedStep

CPU = torch.device("cpu")


class Case(NamedTuple):
    """What is computed: ``work`` has the cached and the new tokens of each span."""

    dtype: torch.dtype
    heads: int
    key_heads: int
    dim: int
    width: int
    layer: AttentionLayer
    softcap: float | None
    sinks: bool
    hidden: bool
    work: tuple[tuple[int, int], ...]
    processors: int
    near: bool = False  # over pages in two parts
    codec: Codec = Codec.EXACT
    joined: bool = False  # rows of latents, whose first ``width`` numbers are the value


FULL = AttentionLayer(Reach.FULL, None, True)
WINDOW, CHUNK = AttentionLayer(Reach.SLIDING, 50, True), AttentionLayer(Reach.CHUNKED, 24, True)
SINGLE, HALF = torch.float32, torch.float16
DECODE, MIXED = ((600, 1), (0, 1), (37, 1)), ((200, 1), (20, 3), (0, 30))
CASES = (
    Case(SINGLE, 9, 3, 64, 64, FULL, None, False, False, DECODE, 8),
    Case(HALF, 6, 2, 24, 24, FULL, 3.0, True, False, DECODE, 8),
    Case(HALF, 8, 2, 64, 64, WINDOW, None, True, False, MIXED, 1),
    Case(HALF, 4, 1, 32, 16, CHUNK, None, False, False, MIXED, 8),
    Case(HALF, 8, 2, 64, 64, WINDOW, None, True, False, MIXED, 1, near=True),
    Case(SINGLE, 4, 1, 32, 32, CHUNK, None, False, False, MIXED, 8, near=True),
    Case(SINGLE, 4, 2, 16, 16, WINDOW, None, False, True, MIXED, 8),
    Case(HALF, 4, 4, 512, 512, FULL, None, False, False, ((70, 1), (0, 2)), 1),
    Case(HALF, 6, 2, 24, 24, FULL, 3.0, True, False, DECODE, 8, codec=Codec.INT8),
    Case(HALF, 8, 2, 64, 64, WINDOW, None, True, False, MIXED, 1, near=True, codec=Codec.FP8),
    Case(SINGLE, 6, 3, 20, 20, FULL, None, False, True, DECODE, 8, codec=Codec.FP8),
    Case(HALF, 16, 1, 576, 512, FULL, None, False, False, DECODE, 8, joined=True),
    Case(HALF, 128, 1, 576, 512, FULL, None, False, False, ((300, 1), (18, 2)), 3, joined=True),
    Case(SINGLE, 16, 1, 576, 512, FULL, None, False, False, ((90, 1), (20, 3)), 1, joined=True),
    Case(SINGLE, 24, 1, 40, 28, WINDOW, 3.0, True, True, MIXED, 8, joined=True),
    Case(HALF, 5, 1, 60, 40, WINDOW, None, False, False, MIXED, 2, near=True, joined=True),
    Case(HALF, 71, 1, 42, 32, CHUNK, None, True, False, ((100, 1), (5, 2)), 8, joined=True),
    Case(HALF, 71, 1, 32, 32, FULL, None, False, True, ((300, 1), (5, 2)), 8),
)


def stored(pool: Any, case: Case, dim: int) -> Any:
    """What a pool stands for, ``[tokens, heads, dim]`` float64. Of records: float32 scales of all heads, up to a
    multiple of 16 bytes, then their numbers.
    """
    if case.codec is Codec.EXACT:
        return pool.astype(np.float64).reshape(-1, case.key_heads, dim)
    flat, begin = pool.reshape(-1, pool.shape[-1]), -(-4 * case.key_heads // 16) * 16
    scales = flat[:, : 4 * case.key_heads].copy().view(np.float32).astype(np.float64)
    bits = flat[:, begin : begin + case.key_heads * dim].reshape(-1, case.key_heads, dim)
    numbers = bits.view(np.int8).astype(np.float64) if case.codec is Codec.INT8 else FP8[bits]
    return numbers * scales[..., None]


def fp8(bits: int) -> float:
    """The number that a byte is: a sign, four bits of exponent, three of mantissa."""
    sign, exponent, mantissa = -1.0 if bits & 0x80 else 1.0, bits >> 3 & 15, bits & 7
    if bits & 0x7F == 0x7F:
        return float("nan")
    return sign * (math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9))


FP8 = np.array([fp8(bits) for bits in range(256)])


def definition(case: Case, step: PackedStep, query: Any, sinks: Any) -> Any:
    """Attention, query by query, in float64: ``[T, H, Dv]``."""
    out = np.zeros((step.tokens, case.heads, case.width))
    pools = [
        stored(pool[0].numpy(), case, dim)
        for pool, dim in zip((step.tier.keys, step.tier.values), (case.dim, case.width), strict=True)
    ]
    for span in step.spans:
        for n in range(span.size):
            at = span.start + n
            first = 0
            if case.layer.window is not None:
                sliding = case.layer.reach is Reach.SLIDING
                first = max(0, at - case.layer.window + 1) if sliding else at // case.layer.window * case.layer.window
            shown = [k for k in range(first, at + 1) if k >= span.start or span.session.mask[k]]
            places = [int(span.session.slots[k // 16]) * 16 + k % 16 for k in shown]
            for head in range(case.heads):
                keys, values = (pool[places, head // (case.heads // case.key_heads)] for pool in pools)
                scores = keys @ query[head, span.row + n] / math.sqrt(case.dim)
                if case.softcap is not None:
                    scores = case.softcap * np.tanh(scores / case.softcap)
                weights = np.exp(scores)
                whole = weights.sum() + (np.exp(sinks[head]) if case.sinks else 0.0)
                out[span.row + n, head] = weights @ values / (whole or 1.0)
    return out


def error(case: Case) -> tuple[float, int]:
    """The largest difference as a share of the largest number, and how many rows were put together from parts."""
    random = torch.Generator().manual_seed(1)
    shape = PageShape(
        case.key_heads, case.dim, case.key_heads, case.width, case.dtype, codec=case.codec, joined=case.joined
    )
    step = random_step(StepSpec(case.work, case.hidden), CPU, shape, random)
    query = torch.randn(step.tokens, case.heads, case.dim, generator=random).to(case.dtype).transpose(0, 1)
    sinks = torch.randn(case.heads, generator=random)
    backend = TritonBackend(CPU)
    backend._processors = case.processors
    out = torch.full((step.tokens, case.heads, case.width), float("nan"), dtype=case.dtype)
    want = definition(case, step, query.double().numpy(), sinks.double().numpy())
    if case.near:
        step = near_step(step, case.layer)
    plan = backend.plan(step, case.layer, step.numbers, True)
    assert plan is not None
    scores = ScoreOptions(case.dim**-0.5, case.softcap, sinks if case.sinks else None)
    backend.attend(plan, step, case.layer, 0, query, scores, out)
    merged = sum(launch.merges for launches in plan._launches.values() for launch in launches)
    return float(np.abs(out.double().numpy() - want).max() / np.abs(want).max()), merged


if __name__ == "__main__":
    for case in CASES:
        found, merged = error(case)
        print(
            json.dumps({"codec": case.codec, "error": found, "merged": merged, "dtype": str(case.dtype)[6:]}),
            flush=True,
        )
