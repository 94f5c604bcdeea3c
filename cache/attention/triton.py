"""The Triton attention backend for GPUs: one launch per layer for spans of any length, with windows, soft caps, sinks
and hidden tokens.

The kernel is in ``kernels/paged.py``. It is used where Triton is installed and its self-test passed on this device for
the signature; torch computes the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch

from cache.attention.backend import Signature, once
from cache.attention.self_test import SelfTest
from cache.attention.work_list import ITEM, Place, divide, tiles
from cache.memory.codec import Codec
from cache.memory.stream import put
from cache.memory.token_record import TokenRecord
from cache.pages.layers import AttentionLayer, Reach, ScoreOptions
from cache.pages.packed import PackedStep

log = logging.getLogger("warmturn.engine")

_FAR = 1 << 30  # tokens: a window that holds everything
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CODECS = {Codec.EXACT: 0, Codec.INT8: 1, Codec.FP8: 2}  # as the kernel knows them
_WIDEST, _WIDEST_REST = 512, 64  # numbers of a head, or of a latent; and of what a row has behind its latent
_FEWEST_KEYS = 16  # of a block: the fewest that a product of tiles takes
_DECODE_ROWS, _ROWS = 16, 64  # queries of a tile: of spans that fit one of 16, and of others
_LATENT_ROWS = 32  # of a tile over rows of latents, whose sums take half of the registers
_SHARED = 90 << 10  # bytes of a tile and its keys and values; small GPUs have 99 KiB, and some of it is used otherwise
_PARTS = 16  # parts of a row that are merged together


class LaunchShape(NamedTuple):
    """How the kernel is compiled for a tile of ``rows`` queries: ``keys`` of one block, warps, and stages of loads."""

    rows: int
    keys: int
    warps: int
    stages: int


def launch_shape(dtype: torch.dtype, group: int, rows: int, widest: int) -> LaunchShape:
    """The shape for about ``rows`` queries per tile, of heads of up to ``widest`` numbers, within the shared memory of
    small GPUs.

    Five stages let the next block of keys and values be read while one is computed with: two blocks lie in shared
    memory. Decode steps wait for memory, so small tiles have them; of a wide head fewer queries are in a tile.
    """
    small = widest <= 128 and dtype is not torch.float32
    keys, width = 64 if small else 32, next_power_of_two(widest) * dtype.itemsize
    while rows > _DECODE_ROWS and (rows + 2 * keys) * width > _SHARED:
        rows //= 2
    rows = max(rows, next_power_of_two(group))
    while keys > _FEWEST_KEYS and (rows + 2 * keys) * width > _SHARED:
        keys //= 2
    double = rows == _DECODE_ROWS and (rows + 4 * keys) * width <= _SHARED
    return LaunchShape(rows, keys, 4 if small else 8, 5 if double else 3)


def latent_shape(dtype: torch.dtype, group: int, rows: int) -> LaunchShape:
    """The shape for about ``rows`` queries per tile over rows of latents, of up to 512 numbers and 64 behind them.

    A block is read once, as keys and as values. Of ``LaunchShape.keys`` each warp computes the scores of 8: with fewer
    keys warps would repeat each other.
    """
    rows = max(rows, next_power_of_two(group))
    if dtype is torch.float32:
        return LaunchShape(rows, _FEWEST_KEYS, 8, 3)
    return LaunchShape(rows, 32, 4, 5) if rows == _DECODE_ROWS else LaunchShape(rows, 32, 8, 3)


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()


def launch_shapes(
    dtype: torch.dtype, heads: int, key_heads: int, widest: int, joined: bool
) -> tuple[dict[int, LaunchShape], int]:
    """The shapes of a layer by their rows, those for decode steps first, and how many tiles of heads there are: one for
    each key head; over rows of latents, which all heads share, as few as hold them.
    """
    if joined:
        most = _DECODE_ROWS if dtype is torch.float32 else _LATENT_ROWS
        count = -(-heads // most)
        made = [latent_shape(dtype, -(-heads // count), rows) for rows in sorted({_DECODE_ROWS, most})]
    else:
        count, wished = key_heads, (_DECODE_ROWS,) if dtype is torch.float32 else (_DECODE_ROWS, _ROWS)
        made = [launch_shape(dtype, heads // key_heads, rows, widest) for rows in wished]
    return {one.rows: one for one in made}, count


class Launch(NamedTuple):
    """The work of one launch for tiles of ``rows`` queries and up to ``tokens`` tokens: see ``WorkList``. There are
    ``items`` and ``merges`` in ``work``, one behind the other.
    """

    rows: int
    tokens: int
    items: int
    merges: int
    work: torch.Tensor


class TritonPlan:
    """The page tables and positions of the spans of a step, for the kernel. It takes all spans. Valid during that
    step.
    """

    unhandled: frozenset[int] = frozenset()

    def __init__(
        self,
        places: list[Place],
        tables: Sequence[torch.Tensor],
        positions: torch.Tensor,
        flags: torch.Tensor | None = None,
    ) -> None:
        """``places``: of each span. ``tables``: slots of their pages, ``[spans, pages]`` int32 for each part of pages.
        ``positions``: of all tokens of the step, ``[T]`` int64. ``flags``: 0 for hidden tokens, ``[spans, flagged]``
        uint8.
        """
        self.tables, self.positions, self.flags = tables, positions, flags
        self.places = places
        self._launches: dict[Any, list[Launch]] = {}

    def launches(
        self, layer: AttentionLayer, group: int, rows: Sequence[int], programs: int, block: int
    ) -> list[Launch]:
        """The launches for a layer whose key heads serve ``group`` query heads, with tiles of ``rows`` queries: the
        spans that fit one of the smaller tiles, and the others. A prompt does not change how others decode.
        """
        key = (layer.kind, group, tuple(rows), programs, block)
        if key not in self._launches:
            self._launches[key] = [
                self._launch(chosen, most, group, layer, programs, block)
                for most, chosen in zip(rows, self._by_size(group, rows), strict=True)
                if chosen
            ]
        return self._launches[key]

    def _by_size(self, group: int, rows: Sequence[int]) -> list[list[int]]:
        """The spans of each launch."""
        found: list[list[int]] = [[] for _ in rows]
        for number, place in enumerate(self.places):
            found[next((at for at, most in enumerate(rows) if place.size * group <= most), -1)].append(number)
        return found

    def _launch(
        self, chosen: list[int], rows: int, group: int, layer: AttentionLayer, programs: int, block: int
    ) -> Launch:
        tokens = min(rows // group, max(self.places[number].size for number in chosen))
        made = divide(tiles(self.places, chosen, tokens, layer), programs, block, tokens)
        items, merges = len(made.items), len(made.merges)
        return Launch(rows, tokens, items, merges, put(made.pad(items, merges), self.positions.device))

    @staticmethod
    def key(spans: frozenset[int]) -> tuple[Any, ...]:
        """The key of the plan for these spans in ``PackedStep.plans``: layers of all kinds share it."""
        return TritonPlan, spans

    @classmethod
    def of(cls, step: PackedStep, spans: frozenset[int]) -> TritonPlan:
        chosen = [step.spans[number] for number in sorted(spans)]
        size, device = step.tier.page_size, step.tier.device
        pages = [-(-span.stop // size) for span in chosen]
        tables = np.zeros((2 if step.tier.near_layers else 1, len(chosen), max(pages, default=0)), np.int32)
        for row, (count, span) in enumerate(zip(pages, chosen, strict=True)):
            tables[0, row, :count] = span.session.slots[:count]
            if step.tier.near_layers:  # of one that does not exist nothing is read
                tables[1, row, :count] = np.maximum(span.session.near_slots[:count], 0)
        flags = None
        if any(span.session.hidden for span in chosen):
            flags = np.ones((len(chosen), max(span.start for span in chosen)), np.uint8)
            for row, span in enumerate(chosen):
                flags[row, : span.start] = np.frombuffer(bytes(span.session.mask), np.uint8)
        places = [Place(span.row, span.size, span.start) for span in chosen]
        shown = None if flags is None else put(flags, device)
        return cls(places, [*put(tables, device)], step.positions[0], shown)


class TritonBackend:
    """The Triton kernel on one device."""

    def __init__(self, device: torch.device) -> None:
        """Raises ``ImportError`` if Triton is not installed."""
        self._functions: Any = import_module("cache.attention.kernels.paged")
        cuda = device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 8
        self._none = torch.zeros(1, 1, 1, device=device)  # passed for tensors that are not used
        self._self_test = SelfTest(self, "attention over pages", device)

    def fits(self, signature: Signature) -> bool:
        shape, dim = signature.shape, signature.dim
        if signature.dtype is not shape.dtype or shape.dtype not in _DTYPES or shape.key_heads != shape.value_heads:
            return False
        widest = max(shape.value_dim, 0 if shape.joined else dim)
        if signature.heads % shape.key_heads or dim != shape.key_dim or widest > _WIDEST:
            return False
        if shape.joined and not 0 < dim - shape.value_dim <= _WIDEST_REST:
            return False
        return self._self_test.passes(signature)

    def plan(self, step: PackedStep, layer: AttentionLayer, spans: frozenset[int], last: bool) -> TritonPlan | None:
        return once(step, TritonPlan.key(spans), lambda: TritonPlan.of(step, spans)) if spans else None

    def attend(
        self,
        plan: TritonPlan,
        step: PackedStep,
        layer: AttentionLayer,
        source: int,
        query: torch.Tensor,
        scores: ScoreOptions,
        out: torch.Tensor,
    ) -> None:
        tier, table = step.tier, plan.tables[step.is_near(layer)]
        shape = tier.shapes[source]
        query = query if query.stride(2) == 1 else query.contiguous()
        keys, key_scales = self._parts(tier.keys[source], shape.key)
        values, value_scales = self._parts(tier.values[source], shape.value)
        heads, width = query.shape[0], values.shape[3]
        rest = keys.shape[3] - width if shape.joined else 0
        dim = keys.shape[3] - rest
        shapes, key_heads = launch_shapes(query.dtype, heads, keys.shape[2], max(dim, width), shape.joined)
        keys, values = (pool.expand(-1, -1, key_heads, -1) for pool in (keys, values))  # all tiles read the same rows
        group = -(-heads // key_heads)
        programs, block = -(-2 * self._processors // key_heads), min(one.keys for one in shapes.values())
        sinks = scores.sinks.detach().float().contiguous() if scores.sinks is not None else self._none
        padded = max(16, next_power_of_two(width))
        for launch in plan.launches(layer, group, [*shapes], programs, block):
            made, parts, stats = shapes[launch.rows], self._none, self._none
            items, merges = launch.work[: launch.items * ITEM], launch.work[launch.items * ITEM :]
            if launch.merges:
                parts = torch.empty(launch.items * launch.tokens, heads, padded, device=out.device)
                stats = torch.empty(launch.items * launch.tokens, heads, 2, device=out.device)
            self._functions.attend[(launch.items * key_heads,)](
                query, keys, values, key_scales, value_scales, out, parts, stats, sinks, table, items, plan.positions,
                self._none if plan.flags is None else plan.flags, 0 if plan.flags is None else plan.flags.shape[1],
                table.stride(0), query.stride(1), query.stride(0), *keys.stride()[:3], *values.stride()[:3],
                *key_scales.stride()[:2], *value_scales.stride()[:2],
                float(scores.scale), float(scores.softcap or 0.0), layer.window or _FAR, heads, key_heads,
                GROUP=group, ROWS=made.rows, KEYS=made.keys, PAGE=tier.page_size, DIM=dim, VALUE=width,
                REST=rest, PADDED_REST=max(16, next_power_of_two(rest)), PADDED=max(16, next_power_of_two(dim)),
                PADDED_VALUE=padded, CHUNKED=layer.reach is Reach.CHUNKED,
                CAPPED=scores.softcap is not None, SINKS=scores.sinks is not None, FLAGS=plan.flags is not None,
                CODEC=_CODECS[shape.codec], num_warps=made.warps, num_stages=made.stages,
            )  # fmt: skip
            if launch.merges:
                self._functions.merge[launch.merges, heads](
                    parts, stats, out, sinks, merges, launch.tokens, heads,
                    VALUE=width, PADDED_VALUE=padded, PARTS=_PARTS, SINKS=scores.sinks is not None,
                )  # fmt: skip

    def _parts(self, pool: torch.Tensor, record: TokenRecord | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers ``[slots, page_size, heads, dim]`` of a pool, and their scales ``[slots, page_size, heads]``."""
        if record is None:
            return pool, self._none
        numbers = record.numbers(pool)
        return numbers.view(torch.int8) if record.codec is Codec.INT8 else numbers, record.scales(pool)


@cache
def triton_backend(device: torch.device) -> TritonBackend | None:
    """The backend for ``device``; None on a CPU, and None with a line in the log, once, without Triton."""
    if device.type != "cuda":
        return None
    try:
        return TritonBackend(device)
    except ImportError as error:
        log.info("attention uses torch only, which is slower over long histories: %s", error)
        return None
