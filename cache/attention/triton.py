"""The Triton attention backend for GPUs: one launch per layer for spans of any length, with windows, soft caps, sinks
and hidden tokens.

The kernel is in ``kernels/paged.py``. It is used where Triton is installed and its self-test passed on this device for
the signature; torch computes the rest.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch

from cache.attention.backend import Signature, once
from cache.attention.self_test import SelfTest
from cache.memory.stream import put
from cache.pages.layers import AttentionLayer, Reach, ScoreOptions
from cache.pages.packed import PackedStep

log = logging.getLogger("warmturn.engine")

_FAR = 1 << 30  # tokens: a window that holds everything
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDEST = 256  # numbers of a head
_SPLITS = 32  # programs, at most, that share the keys of one tile
_DECODE_ROWS, _ROWS = 16, 64  # queries of a tile: where every span has one token, and else


class LaunchShape(NamedTuple):
    """The shape of a kernel launch: tiles of ``rows`` queries, which are those of ``tokens`` tokens of one span, and
    ``splits`` programs among which the keys of a tile are divided.
    """

    rows: int
    tokens: int
    splits: int


def launch_shape(group: int, key_heads: int, rows: int, spans: int, tokens: int, processors: int) -> LaunchShape:
    """The shape of a launch for ``spans`` with ``tokens`` in all, about ``rows`` queries per tile.

    It does not depend on the lengths of the histories: one launch shape serves the same sessions at every length.
    """
    rows = max(rows, next_power_of_two(group))
    each = rows // group
    tiles = spans if spans == tokens else spans + tokens // each
    wanted = min(2 * processors // (tiles * key_heads), _SPLITS)
    return LaunchShape(rows, each, 1 << (wanted.bit_length() - 1) if wanted > 1 else 1)


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()


class TritonPlan:
    """The page tables and positions of the spans of a step, for the kernel. It takes all spans. Valid during that
    step.
    """

    unhandled: frozenset[int] = frozenset()

    def __init__(
        self,
        places: list[tuple[int, int]],
        table: torch.Tensor,
        positions: torch.Tensor,
        flags: torch.Tensor | None = None,
    ) -> None:
        """``places``: first row and number of tokens of each span. ``table``: slots of their pages, ``[spans, pages]``
        int32. ``positions``: of all tokens of the step, ``[T]`` int64. ``flags``: 0 for hidden tokens, ``[spans,
        flagged]`` uint8.
        """
        self.table, self.positions, self.flags = table, positions, flags
        self.longest = max((size for _, size in places), default=0)
        self.tokens = sum(size for _, size in places)
        self.spans = len(places)
        self._places = places
        self._tiles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def tiles(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The spans in tiles of up to ``tokens``: span, first row and number of tokens of each, ``[tiles, 3]`` int32;
        and the row of each place in the tiles, -1 if it is empty, ``[tiles * tokens]`` int32.
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

    @staticmethod
    def key(spans: frozenset[int]) -> tuple[Any, ...]:
        """The key of the plan for these spans in ``PackedStep.plans``: layers of all kinds share it."""
        return TritonPlan, spans

    @classmethod
    def of(cls, step: PackedStep, spans: frozenset[int]) -> TritonPlan:
        """The plan for these spans of a step."""
        chosen = [step.spans[number] for number in sorted(spans)]
        size, device = step.tier.page_size, step.tier.device
        pages = [-(-span.stop // size) for span in chosen]
        table = np.zeros((len(chosen), max(pages, default=0)), np.int32)
        for row, (count, span) in enumerate(zip(pages, chosen, strict=True)):
            table[row, :count] = span.session.slots[:count]
        flags = None
        if any(span.session.hidden for span in chosen):
            flags = np.ones((len(chosen), max(span.start for span in chosen)), np.uint8)
            for row, span in enumerate(chosen):
                flags[row, : span.start] = np.frombuffer(bytes(span.session.mask), np.uint8)
        places = [(span.row, span.size) for span in chosen]
        shown = None if flags is None else put(flags, device)
        return cls(places, put(table, device), step.positions[0], shown)


class TritonBackend:
    """The Triton kernel on one device."""

    def __init__(self, device: torch.device) -> None:
        """Raises ``ImportError`` if Triton is not installed."""
        self._functions: Any = import_module("cache.attention.kernels.paged")
        cuda = device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 8
        self._none = torch.zeros(1, device=device)  # passed for tensors that are not used
        self._self_test = SelfTest(self, "attention over pages", device)

    def fits(self, signature: Signature) -> bool:
        """See ``Backend.fits``."""
        shape, dim = signature.shape, signature.dim
        if signature.dtype is not shape.dtype or shape.dtype not in _DTYPES or shape.key_heads != shape.value_heads:
            return False
        if signature.heads % shape.key_heads or dim != shape.key_dim or max(dim, shape.value_dim) > _WIDEST:
            return False
        return self._self_test.passes(signature)

    def plan(self, step: PackedStep, layer: AttentionLayer, spans: frozenset[int], last: bool) -> TritonPlan | None:
        """A plan for all of the spans."""
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
        """See ``Backend.attend``."""
        tier = step.tier
        query = query if query.stride(2) == 1 else query.contiguous()
        keys, values = tier.keys[source], tier.values[source]
        heads, key_heads, dim, width = query.shape[0], keys.shape[2], keys.shape[3], values.shape[3]
        most = _DECODE_ROWS if plan.longest == 1 or keys.element_size() == 4 else _ROWS
        shape = launch_shape(heads // key_heads, key_heads, most, plan.spans, plan.tokens, self._processors)
        tiles, rows = plan.tiles(shape.tokens)
        padded = max(16, next_power_of_two(width))
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
            VALUE=width, PADDED=max(16, next_power_of_two(dim)), PADDED_VALUE=padded, PARTS=shape.splits > 1,
            CHUNKED=layer.reach is Reach.CHUNKED, CAPPED=scores.softcap is not None, SINKS=scores.sinks is not None,
            FLAGS=plan.flags is not None, num_warps=4 if small else 8,
        )  # fmt: skip
        if shape.splits > 1:
            self._functions.merge[len(rows), heads](
                parts, stats, out, sinks, rows, heads,
                VALUE=width, PADDED_VALUE=padded, SPLITS=shape.splits, SINKS=scores.sinks is not None,
            )  # fmt: skip


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
