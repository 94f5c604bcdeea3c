"""Attention over pages in place on a GPU: one call a layer, for any lengths, windows, soft caps, sinks, hidden tokens.

``kernels/paged.py`` computes it. It is used where Triton is there and where, for the shapes at hand, the kernel has
shown to be right on this device; everything else goes torch's way.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch

from cache.attention.trial import LAYERS, right
from cache.memory.stream import put
from cache.memory.tier import MemoryTier, PageShape
from cache.pages.layers import AttentionLayer, Reach, ScoreOptions
from cache.pages.packed import PackedStep

log = logging.getLogger("warmturn.engine")

_FAR = 1 << 30  # tokens: a window that holds everything
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST = 256  # numbers of a head
_SPLITS = 32  # programs, at most, that share the keys of one tile
_DECODE_ROWS, _ROWS = 16, 64  # queries of a tile: where every segment has one token, and else


class Shape(NamedTuple):
    """How a launch is cut: ``rows`` queries a tile, of ``tokens`` of one segment; ``splits`` programs for its keys."""

    rows: int
    tokens: int
    splits: int


def cut(group: int, key_heads: int, rows: int, segments: int, tokens: int, processors: int) -> Shape:
    """The shape of a launch over ``segments`` of together ``tokens``, about ``rows`` queries a tile.

    How long the histories are does not matter: one launch serves the same sessions at every length.
    """
    rows = max(rows, power(group))
    each = rows // group
    tiles = segments if segments == tokens else segments + tokens // each
    wanted = min(2 * processors // (tiles * key_heads), _SPLITS)
    return Shape(rows, each, 1 << (wanted.bit_length() - 1) if wanted > 1 else 1)


def power(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << (number - 1).bit_length()


class Plan:
    """Which segments of a step the kernel takes (``numbers``), and what it must know of them. Valid as long as the
    step.
    """

    def __init__(
        self,
        numbers: frozenset[int],
        places: list[tuple[int, int]],
        table: torch.Tensor,
        positions: torch.Tensor,
        flags: torch.Tensor | None = None,
    ) -> None:
        """``places``: row and tokens of each. ``table``: their slots, ``[segments, pages]`` int32. ``positions``: of
        all tokens of the step. ``flags``: 0 for hidden tokens, ``[segments, flagged]`` uint8.
        """
        self.numbers = numbers
        self.table, self.positions, self.flags = table, positions, flags
        self.most = max((size for _, size in places), default=0)
        self.tokens = sum(size for _, size in places)
        self.segments = len(places)
        self._places = places
        self._tiles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def tiles(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The segments in tiles of up to ``tokens``: segment, row and tokens of each ``[tiles, 3]`` int32; and the row
        of each place in them, -1 where it is empty, ``[tiles * tokens]`` int32.
        """
        if tokens not in self._tiles:
            cuts = [
                (number, row + at, min(tokens, size - at))
                for number, (row, size) in enumerate(self._places)
                for at in range(0, size, tokens)
            ]
            tiles = np.array(cuts, np.int32)
            lanes = np.arange(tokens, dtype=np.int32)[None]
            rows = np.where(lanes < tiles[:, 2:], tiles[:, 1:2] + lanes, np.int32(-1))
            device = self.table.device
            self._tiles[tokens] = put(tiles, device), put(rows.ravel(), device)
        return self._tiles[tokens]


def plan(step: PackedStep, numbers: frozenset[int]) -> Plan:
    """A plan for these segments of a step."""
    chosen = [step.segments[number] for number in sorted(numbers)]
    size, device = step.tier.page_size, step.tier.device
    pages = [-(-segment.stop // size) for segment in chosen]
    table = np.zeros((len(chosen), max(pages, default=0)), np.int32)
    for row, (count, segment) in enumerate(zip(pages, chosen, strict=True)):
        table[row, :count] = segment.session.slots[:count]
    flags = None
    if any(segment.session.hidden for segment in chosen):
        flags = np.ones((len(chosen), max(segment.start for segment in chosen)), np.uint8)
        for row, segment in enumerate(chosen):
            flags[row, : segment.start] = np.frombuffer(bytes(segment.session.mask), np.uint8)
    places = [(segment.row, segment.size) for segment in chosen]
    shown = None if flags is None else put(flags, device)
    return Plan(numbers, places, put(table, device), step.positions[0], shown)


class Kernel:
    """The kernel on one device. Shapes that it has not computed before are compared with torch first."""

    def __init__(self, device: torch.device) -> None:
        """Raises ``ImportError`` without Triton."""
        self._functions: Any = import_module("cache.attention.kernels.paged")
        self._device = device
        cuda = device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 8
        self._none = torch.zeros(1, device=device)  # stands for what is not there
        self._right: dict[tuple[Any, ...], bool] = {}

    def fits(
        self, shape: PageShape, heads: int, dim: int, dtype: torch.dtype, scores: ScoreOptions, layer: AttentionLayer
    ) -> bool:
        """Whether the kernel can compute, and computes right, queries of so many heads over pages of ``shape``."""
        if dtype is not shape.dtype or dtype not in _DTYPES or shape.key_heads != shape.value_heads:
            return False
        if heads % shape.key_heads or dim != shape.key_dim or max(dim, shape.value_dim) > _WIDEST:
            return False
        kind = (shape, heads, scores.softcap is not None, scores.sinks is not None, layer.reach is Reach.CHUNKED)
        if kind not in self._right:
            self._right[kind] = self._compare(*kind)
        return self._right[kind]

    def attend(
        self,
        plan: Plan,
        layer: AttentionLayer,
        tier: MemoryTier,
        source: int,
        query: torch.Tensor,
        scores: ScoreOptions,
        out: torch.Tensor,
    ) -> None:
        """Attention of ``query [H, T, D]`` over the pages of layer ``source``, for the rows of the plan's segments,
        into the same rows of ``out [T, H, Dv]`` (contiguous). The caller has asked ``fits``.
        """
        if not plan.numbers:
            return
        query = query if query.stride(2) == 1 else query.contiguous()
        keys, values = tier.keys[source], tier.values[source]
        heads, key_heads, dim, width = query.shape[0], keys.shape[2], keys.shape[3], values.shape[3]
        most = _DECODE_ROWS if plan.most == 1 or keys.element_size() == 4 else _ROWS
        shape = cut(heads // key_heads, key_heads, most, plan.segments, plan.tokens, self._processors)
        tiles, rows = plan.tiles(shape.tokens)
        padded = max(16, power(width))
        parts, stats = out, self._none
        if shape.splits > 1:
            parts = torch.empty(len(rows), heads, shape.splits, padded, device=out.device)
            stats = torch.empty(len(rows), heads, shape.splits, 2, device=out.device)
        sinks = scores.sinks.detach().float().contiguous() if scores.sinks is not None else self._none
        single = keys.element_size() == 4
        small = max(dim, width) <= 128 and not single
        self._functions.attend[len(tiles), key_heads, shape.splits](
            query, keys, values, parts, stats, sinks, plan.table, tiles, plan.positions,
            self._none if plan.flags is None else plan.flags, 0 if plan.flags is None else plan.flags.shape[1],
            plan.table.stride(0), query.stride(1), query.stride(0), *keys.stride()[:3], *values.stride()[:3],
            float(scores.scale), float(scores.softcap or 0.0), layer.window or _FAR, heads, shape.splits,
            GROUP=heads // key_heads, ROWS=shape.rows, KEYS=64 if small else 32, PAGE=tier.page_size, DIM=dim,
            VALUE=width, PADDED=max(16, power(dim)), PADDED_VALUE=padded, PARTS=shape.splits > 1,
            CHUNKED=layer.reach is Reach.CHUNKED, CAPPED=scores.softcap is not None, SINKS=scores.sinks is not None,
            FLAGS=plan.flags is not None, num_warps=4 if small else 8,
        )  # fmt: skip
        if shape.splits > 1:
            self._functions.merge[len(rows), heads](
                parts, stats, out, sinks, rows, heads,
                VALUE=width, PADDED_VALUE=padded, SPLITS=shape.splits, SINKS=scores.sinks is not None,
            )  # fmt: skip

    def _compare(self, shape: PageShape, heads: int, capped: bool, sinks: bool, chunked: bool) -> bool:
        """Whether it is right, on made-up steps of every kind."""

        def attend(
            step: PackedStep, layer: AttentionLayer, query: torch.Tensor, scores: ScoreOptions, out: torch.Tensor
        ) -> None:
            self.attend(plan(step, frozenset(range(len(step.segments)))), layer, step.tier, 0, query, scores, out)

        layers = [layer for layer in LAYERS if (layer.reach is Reach.CHUNKED) is chunked]
        return right("attention over pages", attend, self._device, shape, heads, capped, sinks, layers=layers)


@cache
def kernel(device: torch.device) -> Kernel | None:
    """The kernel for ``device``; None on a CPU and, said once in the log, where there is no Triton."""
    if device.type != "cuda":
        return None
    try:
        return Kernel(device)
    except ImportError as error:
        log.info("attention is torch's alone, slower over long histories: %s", error)
        return None
