"""The CPU attention backend: one call of a C++ kernel per layer, for all sessions of a step.

The kernel is ``kernels/attention.cpp``. It is used where it could be compiled and its self-test passed for the
signature, and for long spans where it is faster than torch: always with tiles (AMX or AVX-512 bfloat16) and for latents
(torch has no fast way for heads so wide), else as ``long_spans.py`` measures. torch computes the rest. ``python -m
cache.attention.cpu`` compiles it in advance.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cache.attention.backend import Signature, once
from cache.attention.long_spans import kernel_is_faster
from cache.attention.self_test import LAYERS, SelfTest, StepSpec
from cache.compiler import NotBuilt, build, has_tiles
from cache.memory.codec import Codec
from cache.memory.memory_tier import PageShape
from cache.pages.layers import AttentionLayer, ScoreOptions
from cache.pages.packed import PackedStep, Span, StepPlan

log = logging.getLogger("warmturn.engine")

SHORT = 32  # tokens of a span up to which the kernel is always the faster way
_PIECE, _SMALL_PIECE = 64, 32  # tokens that are attended to together: their sums stay in a near cache
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CODECS = {Codec.EXACT: 0, Codec.INT8: 1, Codec.FP8: 2}
_STORED = 5  # tokens
# Steps of the self-test, by the tokens cached and new of each session.
_TRIED = ((300, 1), (20, 3), (0, 20)), ((150, 40), (0, 90), (3, 1))


class AttentionCall(ctypes.Structure):
    """The struct ``Call`` of kernels/layout.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value")),
        *((name, ctypes.c_int64) for name in ("query_row", "query_head", "key_slot", "key_token", "key_head")),
        *((name, ctypes.c_int64) for name in ("value_slot", "value_token", "value_head")),
        *((name, ctypes.c_void_p) for name in ("out", "sinks", "first", "spans", "team")),
        *((name, ctypes.c_int64) for name in ("count", "page", "heads", "key_heads", "key_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("threads", "type", "codec", "key_begin", "value_begin")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class StoreCall(ctypes.Structure):
    """The struct ``Store`` of kernels/attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("key", "value", "key_pages", "value_pages")),
        *((name, ctypes.c_int64) for name in ("rows", "heads", "key_dim", "value_dim", "key_begin", "value_begin")),
        *((name, ctypes.c_int64) for name in ("key_bytes", "value_bytes", "codec", "type")),
    )

    def take(self, shape: PageShape) -> None:
        """Set what depends on the shape of a layer's pages, which are records."""
        key, value = shape.key, shape.value
        assert key is not None
        assert value is not None
        self.heads, self.key_dim, self.value_dim = shape.key_heads, shape.key_dim, shape.value_dim
        self.key_begin, self.value_begin, self.key_bytes, self.value_bytes = (
            *(key.begin, value.begin),
            *(key.nbytes, value.nbytes),
        )
        self.codec, self.type = _CODECS[shape.codec], _TYPES[shape.dtype]


class CpuPlan(StepPlan):
    """The spans of a step that the kernel takes in layers of one kind, and the kernel's call for them. Valid during
    that step, and those that follow it.

    ``numbers`` are those spans, ``rest`` the spans that it leaves (``unhandled``).
    """

    def __init__(
        self, step: PackedStep, layer: AttentionLayer, numbers: frozenset[int], rest: frozenset[int] = frozenset()
    ) -> None:
        self.tier, self.numbers, self.unhandled = step.tier, numbers, rest
        self._layer, self._order = layer, sorted(numbers)
        self._tables: list[torch.Tensor] = []  # these and the flags are kept since spans have their addresses
        self._flags: list[Any] = []
        self._first = np.zeros(step.tokens, np.int64)
        self._spans = np.array(self._read(step), np.int64)
        self.call = AttentionCall(
            first=self._first.ctypes.data,
            spans=self._spans.ctypes.data,
            count=len(self._spans),
            page=step.tier.page_size,
        )
        self.call.threads = torch.get_num_threads()
        self.shape: PageShape | None = None  # that ``call`` is set to

    def follow(self, step: PackedStep) -> bool:
        """See ``StepPlan``."""
        if self._flags or not self._order:
            return False
        self._spans[:] = self._read(step)
        self.call.threads = torch.get_num_threads()
        return True

    def _read(self, step: PackedStep) -> list[tuple[int, ...]]:
        """Its spans as the kernel reads them; sets the first key that each of their rows sees, too."""
        chosen = [step.spans[number] for number in self._order]
        for span in chosen if self._layer.window is not None else ():
            for i in range(span.size):
                self._first[span.row + i] = self._layer.first_key(span.start + i)
        self._tables = []
        return [row for span in chosen for row in self._rows(step, span)]

    def _rows(self, step: PackedStep, span: Span) -> Iterator[tuple[int, ...]]:
        """A ``Span`` of kernels/layout.h for each piece of a span."""
        self._tables.append(table := step.table(span, self._layer))
        where, flagged = 0, 0
        if span.session.hidden:
            self._flags.append(flags := np.frombuffer(bytes(span.session.mask), np.uint8))
            where, flagged = flags.ctypes.data, len(flags)
        piece = _SMALL_PIECE if span.size <= _SMALL_PIECE else _piece(step.tier.shapes.values())
        for at in range(0, span.size, piece):
            size = min(piece, span.size - at)
            yield table.data_ptr(), where, flagged, span.row + at, size, span.start + at

    def read(self, source: int, heads: int) -> None:
        """Set ``call`` to read the pages of layer ``source``."""
        call, shape, keys, values = (
            self.call,
            self.tier.shapes[source],
            self.tier.keys[source],
            self.tier.values[source],
        )
        key_begin, value_begin = (0 if record is None else record.begin for record in (shape.key, shape.value))
        call.key, call.value = keys.data_ptr() + key_begin, values.data_ptr() + value_begin
        call.heads = heads
        if shape == self.shape:
            return
        self.shape = shape
        call.key_heads, call.key_dim, call.value_dim = shape.key_heads, shape.key_dim, shape.value_dim
        call.key_slot, call.key_token, call.key_head = *keys.stride()[:2], shape.key_dim
        call.value_slot, call.value_token, call.value_head = *values.stride()[:2], shape.value_dim
        call.type, call.codec, call.key_begin, call.value_begin = (
            *(_TYPES[shape.dtype], _CODECS[shape.codec]),
            *(key_begin, value_begin),
        )


def _plan_for_all(step: PackedStep, layer: AttentionLayer) -> CpuPlan:
    """For long spans too, whether or not the kernel is the faster way."""
    return CpuPlan(step, layer, step.numbers)


def _piece(shapes: Collection[PageShape]) -> int:
    """Tokens of a long span that are attended to together. Threads divide pieces, or the key heads of larger ones."""
    divided = all(shape.key_heads > 1 for shape in shapes)
    return _PIECE if divided and not _by_tiles(shapes) else _SMALL_PIECE


def _is_known(shape: PageShape) -> bool:
    return shape.dtype in _TYPES and shape.key_heads == shape.value_heads


def _by_tiles(shapes: Iterable[PageShape]) -> bool:
    """Whether the kernel takes all pages of these shapes by tiles."""
    return has_tiles() and all(
        shape.dtype is torch.bfloat16 and shape.key_dim % 32 == 0 and shape.value_dim % 32 == 0 for shape in shapes
    )


class CpuBackend:
    """The compiled CPU kernel."""

    def __init__(self, path: Path) -> None:
        """``path``: of the shared object. Raises ``OSError`` if it cannot be loaded, ``AttributeError`` if it lacks the
        function.
        """
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()  # the system gives matrix units to those who ask
        functions = ctypes.CDLL(str(path))
        self._function = functions.warmturn_attend
        self._function.argtypes = [ctypes.POINTER(AttentionCall)]
        self._store = functions.warmturn_store
        self._store.argtypes = [ctypes.POINTER(StoreCall), ctypes.c_void_p]
        self._store.restype = None
        self.store_address = ctypes.cast(self._store, ctypes.c_void_p).value
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value
        self._team = team_address()
        self._stores: dict[PageShape, bool] = {}
        self._faster: dict[PageShape, bool] = {}
        cpu = torch.device("cpu")
        self._self_test = SelfTest(self, "the compiled attention", cpu, _trial_steps, _plan_for_all)

    def fits(self, signature: Signature) -> bool:
        shape = signature.shape
        if signature.dtype is not shape.dtype or not _is_known(shape):
            return False
        if signature.heads % shape.key_heads or signature.dim != shape.key_dim:
            return False
        return self._self_test.passes(signature)

    def plan(self, step: PackedStep, layer: AttentionLayer, spans: frozenset[int], last: bool) -> CpuPlan | None:
        """For short spans, and for long ones where the kernel is faster."""

        def make() -> CpuPlan:
            long = frozenset(number for number in spans if step.spans[number].size > SHORT)
            rest = frozenset() if not long or self._takes_all(step.tier.shapes.values()) else long
            return CpuPlan(step, layer, spans - rest, rest)

        return once(step, (CpuPlan, layer.kind, spans), make)

    def _takes_all(self, shapes: Collection[PageShape]) -> bool:
        """Whether the kernel is used for long spans over pages of these shapes, too: those that it knows decide."""
        known = {shape for shape in shapes if _is_known(shape) and not shape.joined}
        return _by_tiles(shapes) or all(map(self._is_faster, known))

    def _is_faster(self, shape: PageShape) -> bool:
        """Whether the kernel is faster than torch for long spans over pages of this shape; timed once."""
        faster = self._faster.get(shape)
        if faster is None:
            faster = self._faster[shape] = kernel_is_faster(shape, self._attend_all)
        return faster

    def _attend_all(self, step: PackedStep, query: torch.Tensor, scores: ScoreOptions, out: torch.Tensor) -> None:
        self.attend(_plan_for_all(step, LAYERS[0]), step, LAYERS[0], 0, query, scores, out)

    def attend(
        self,
        plan: CpuPlan,
        step: PackedStep,
        layer: AttentionLayer,
        source: int,
        query: torch.Tensor,
        scores: ScoreOptions,
        out: torch.Tensor,
    ) -> None:
        """See ``Backend.attend``. Raises ``MemoryError`` if the kernel cannot allocate memory."""
        if not plan.numbers:
            return
        query = query if query.stride(2) == 1 else query.contiguous()
        sinks = scores.sinks.detach().float().contiguous() if scores.sinks is not None else None
        where = (query.data_ptr(), query.stride(0), query.stride(1), out.data_ptr())
        self.prepare(plan, source, query.shape[0], where, scores, sinks)
        if self._function(ctypes.byref(plan.call)):
            raise MemoryError("no memory for attention")

    def stores(self, shape: PageShape) -> bool:
        """Whether ``store`` stores records of this shape as torch, bit for bit. Tried once; a failure is logged."""
        right = self._stores.get(shape)
        if right is None:
            right = self._stores[shape] = self._try_store(shape)
            if not right:
                log.info("the compiled attention stores wrong records for %s: layers run block by block", shape)
        return right

    def _try_store(self, shape: PageShape) -> bool:
        key, value = shape.key, shape.value
        assert key is not None
        assert value is not None
        random, sizes = torch.Generator().manual_seed(0), torch.logspace(-3, 3, _STORED)[:, None, None]
        tokens = [
            torch.randn(_STORED, record.heads, record.dim, generator=random).mul(sizes).to(shape.dtype)
            for record in (key, value)
        ]
        pools = [torch.zeros(_STORED, record.nbytes, dtype=torch.uint8) for record in (key, value)]
        call = StoreCall(tokens[0].data_ptr(), tokens[1].data_ptr(), pools[0].data_ptr(), pools[1].data_ptr(), _STORED)
        call.take(shape)
        self.store(call, torch.arange(_STORED - 1, -1, -1))
        made = (record.pack(new).flip(0) for record, new in zip((key, value), tokens, strict=True))
        return all(map(torch.equal, pools, made))

    def store(self, call: StoreCall, places: torch.Tensor) -> None:
        """Store the tokens of ``call`` as records at ``places [n]`` (slot * page_size + offset)."""
        self._store(ctypes.byref(call), places.data_ptr())

    def prepare(
        self,
        plan: CpuPlan,
        source: int,
        heads: int,
        where: tuple[int, int, int, int],
        scores: ScoreOptions,
        sinks: torch.Tensor | None,
    ) -> int:
        """The address of the plan's ``AttentionCall``, set for this call: passed to the function at ``address``, it
        computes what ``attend`` does. The next call for the same plan overwrites it.

        ``where``: address of the queries, elements from head to head and from row to row, address of the output.
        ``sinks``: those of ``scores``, ``[heads]`` float32 and contiguous.
        """
        plan.read(source, heads)
        call = plan.call
        call.query, call.query_head, call.query_row, call.out = where
        call.scale, call.softcap = scores.scale, scores.softcap or 0.0
        call.sinks = sinks.data_ptr() if sinks is not None else None
        call.team = self._team
        return ctypes.addressof(call)


def _trial_steps(signature: Signature) -> Iterator[StepSpec]:
    """The steps of the self-test. Steps with hidden tokens are enough: the kernel has no separate code for others."""
    return (StepSpec(sessions, True) for sessions in _TRIED)


@cache
def cpu_backend() -> CpuBackend | None:
    """The backend of this process, compiled if necessary. If it cannot be had: None, and a line in the log, once."""
    try:
        return CpuBackend(build(Path(__file__).with_name("kernels") / "attention.cpp"))
    except (NotBuilt, OSError, AttributeError) as error:
        reason = error if isinstance(error, NotBuilt) else "the compiled file cannot be loaded"
        log.info("attention uses torch only, which is slower over long histories: %s", reason)
        return None


@cache
def team_address() -> int | None:
    """The address of the function with which all kernels of this process divide work among threads
    (``kernels/team.cpp``); None if it cannot be compiled: then each kernel uses one thread.
    """
    try:
        function = ctypes.CDLL(str(build(Path(__file__).with_name("kernels") / "team.cpp"))).warmturn_run_parallel
        return ctypes.cast(function, ctypes.c_void_p).value
    except (NotBuilt, OSError, AttributeError):
        return None


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(0 if cpu_backend() is not None else 1)
