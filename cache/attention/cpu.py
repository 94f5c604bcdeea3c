"""The CPU attention backend: one call of a C++ kernel per layer, for all sessions of a step.

The kernel is ``kernels/attention.cpp``. Without tiles (AMX or AVX-512 bfloat16) it takes short spans only. It is used
where it could be compiled and its self-test passed for the signature; torch computes the rest. ``python -m
cache.attention.cpu`` compiles it in advance.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cache.attention.backend import Signature, once
from cache.attention.self_test import SelfTest, StepSpec
from cache.compiler import NotBuilt, built, has_tiles
from cache.memory.tier import PageShape
from cache.pages.layers import AttentionLayer, ScoreOptions
from cache.pages.packed import PackedStep

log = logging.getLogger("warmturn.engine")

SHORT = 32  # tokens of a span up to which the kernel is the faster way; by tiles it is for any number
_PIECE = 32  # tokens that are attended to together: their sums stay in a near cache
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_TRIED = ((300, 1), (20, 3), (0, 20))  # tokens cached and new of each session of a step
_TRIED_BY_TILES = ((150, 40), (0, 90), (3, 1))


class AttentionCall(ctypes.Structure):
    """The struct ``AttentionCall`` of attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value")),
        *((name, ctypes.c_int64) for name in ("query_row", "query_head", "key_slot", "key_token", "key_head")),
        *((name, ctypes.c_int64) for name in ("value_slot", "value_token", "value_head")),
        *((name, ctypes.c_void_p) for name in ("out", "sinks", "first", "spans", "team")),
        *((name, ctypes.c_int64) for name in ("count", "page", "heads", "key_heads", "key_dim", "value_dim")),
        *((name, ctypes.c_int64) for name in ("threads", "type")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class CpuPlan:
    """The spans of a step that the kernel takes in layers of one kind, and the kernel's call for them. Valid during
    that step.

    ``numbers`` are those spans, ``rest`` the spans that it leaves.
    """

    def __init__(self, step: PackedStep, layer: AttentionLayer, spans: frozenset[int]) -> None:
        self.tier = step.tier
        tiles = _by_tiles(step.tier.shapes.values())
        self.numbers = spans if tiles else frozenset(n for n in spans if step.spans[n].size <= SHORT)
        self.unhandled = spans - self.numbers
        self._alive: list[Any] = []  # what the addresses point to
        first = np.zeros(step.tokens, np.int64)
        for span in (step.spans[number] for number in self.numbers):
            for i in range(span.size):
                first[span.row + i] = layer.first_key(span.start + i)
        rows = np.array([row for number in sorted(self.numbers) for row in self._rows(step, number)], np.int64)
        self._alive += [first, rows]
        self.call = AttentionCall(
            first=first.ctypes.data, spans=rows.ctypes.data, count=len(rows), page=step.tier.page_size
        )
        self.call.threads = torch.get_num_threads()
        self.shape: PageShape | None = None  # that ``call`` is set to

    def _rows(self, step: PackedStep, number: int) -> Iterator[tuple[int, ...]]:
        """A ``Span`` of attention.cpp for each piece of a span."""
        span = step.spans[number]
        table, hidden = span.session.table(step.tier.device), span.session.hidden
        flags = np.frombuffer(bytes(span.session.mask), np.uint8) if hidden else None
        self._alive += [table, flags]
        where, flagged = (0, 0) if flags is None else (flags.ctypes.data, len(flags))
        for at in range(0, span.size, _PIECE):
            size = min(_PIECE, span.size - at)
            yield table.data_ptr(), where, flagged, span.row + at, size, span.start + at

    def read(self, source: int, heads: int) -> None:
        """Set ``call`` to read the pages of layer ``source``."""
        call, shape = self.call, self.tier.shapes[source]
        call.key, call.value = self.tier.keys[source].data_ptr(), self.tier.values[source].data_ptr()
        call.heads = heads
        if shape == self.shape:
            return
        self.shape = shape
        call.key_heads, call.key_dim, call.value_dim = shape.key_heads, shape.key_dim, shape.value_dim
        call.key_slot, call.key_token, call.key_head = self.tier.keys[source].stride()[:3]
        call.value_slot, call.value_token, call.value_head = self.tier.values[source].stride()[:3]
        call.type = _TYPES[shape.dtype]


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
        self._function = ctypes.CDLL(str(path)).warmturn_attend
        self._function.argtypes = [ctypes.POINTER(AttentionCall)]
        self.address = ctypes.cast(self._function, ctypes.c_void_p).value
        self._team = team_address()
        self._self_test = SelfTest(self, "the compiled attention", torch.device("cpu"), _tried)

    def fits(self, signature: Signature) -> bool:
        """See ``Backend.fits``."""
        shape = signature.shape
        if signature.dtype is not shape.dtype or shape.dtype not in _TYPES or shape.key_heads != shape.value_heads:
            return False
        if signature.heads % shape.key_heads or signature.dim != shape.key_dim:
            return False
        return self._self_test.passes(signature)

    def plan(self, step: PackedStep, layer: AttentionLayer, spans: frozenset[int], last: bool) -> CpuPlan | None:
        """For short spans; for all spans if the kernel uses tiles."""
        return once(step, (CpuPlan, layer.kind, spans), lambda: CpuPlan(step, layer, spans))

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
        ``sinks``: those of ``scores``, float32 and contiguous.
        """
        plan.read(source, heads)
        call = plan.call
        call.query, call.query_head, call.query_row, call.out = where
        call.scale, call.softcap = scores.scale, scores.softcap or 0.0
        call.sinks = sinks.data_ptr() if sinks is not None else None
        call.team = self._team
        return ctypes.addressof(call)


def _tried(signature: Signature) -> Iterator[StepSpec]:
    """The steps of the self-test. Steps with hidden tokens are enough: the kernel has no separate code for others."""
    yield StepSpec(_TRIED, True)
    if _by_tiles([signature.shape]):
        yield StepSpec(_TRIED_BY_TILES, True)


@cache
def cpu_backend() -> CpuBackend | None:
    """The backend of this process, compiled if necessary. If it cannot be had: None, and a line in the log, once."""
    try:
        return CpuBackend(built(Path(__file__).with_name("kernels") / "attention.cpp"))
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
        function = ctypes.CDLL(str(built(Path(__file__).with_name("kernels") / "team.cpp"))).warmturn_run_parallel
        return ctypes.cast(function, ctypes.c_void_p).value
    except (NotBuilt, OSError, AttributeError):
        return None


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(0 if cpu_backend() is not None else 1)
