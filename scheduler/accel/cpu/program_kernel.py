"""``ProgramKernel``: the compiled functions of ``kernels/program.cpp``."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cache.attention.cpu import team_address
from cache.compiler import NotBuilt, build
from scheduler.weights.packed_source import PackedRows
from scheduler.weights.scale_layout import StoredRows

log = logging.getLogger("warmturn.engine")
_ALIGNED = 16  # floats


class Adapters(ctypes.Structure):
    """The struct ``Adapters`` of low_rank.h: what adapters add to the step that runs; zeros where no row has one."""

    _fields_ = (
        ("of_row", ctypes.c_void_p),
        ("maps", ctypes.c_void_p),
        ("weights", ctypes.c_int64),
        ("most", ctypes.c_int64),
        ("low", ctypes.c_void_p),
    )


_TWO = ctypes.c_int64 * 2


class _Codes(ctypes.Structure):
    """The struct ``Codes`` of codes.h."""

    _fields_ = tuple(
        (name, ctypes.c_void_p if name in ("from", "fields", "to") else ctypes.c_int64)
        for name in (
            *("from", "columns", "row_bytes", "inside", "fields", "field_count", "elements", "block_bytes"),
            *("bits", "together", "flipped", "to", "step", "head", "coarse", "every", "group"),
        )
    )


class _Numbers(ctypes.Structure):
    """The struct ``Numbers`` of scales.h."""

    _fields_ = (
        ("from", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("columns", "row_bytes", "inside", "elements", "block_bytes", "kinds")),
        ("halves", _TWO),
        ("bits", ctypes.c_void_p),
        ("bit_counts", _TWO),
        *((name, ctypes.c_int64) for name in ("less", "negated", "parts")),
        ("to", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("step", "coarse", "group")),
    )


@dataclass(frozen=True)
class CodePlaces:
    """Where codes go, block after block of 32 elements of 64 columns: ``bits`` of each are written, and ``together``
    elements of a column lie after each other. ``step``: bytes from one block to the next; ``head``: those before its
    codes; ``coarse``: those before each ``every`` blocks. ``flipped``: bits that are written the other way round, if
    there are 8.
    """

    bits: int
    together: int
    step: int
    head: int = 0
    coarse: int = 0
    every: int = 1
    flipped: int = 0


class ProgramKernel:
    """The compiled functions, and the memory that all programs share, as they run one after the other."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.run, self.attend_between = library.warmturn_run, library.warmturn_attend_between
        self.chain = library.warmturn_chain
        self.run.argtypes = [ctypes.c_void_p]
        self.attend_between.argtypes = [ctypes.c_void_p] * 3
        # The addresses of these.
        self.convolve = ctypes.cast(library.warmturn_convolve, ctypes.c_void_p).value
        self.delta_rule = ctypes.cast(library.warmturn_delta_rule, ctypes.c_void_p).value
        self.chain.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self.team = team_address()
        self.threads = max(torch.get_num_threads(), os.cpu_count() or 1) if self.team else 1  # at most
        self.tiles = not library.warmturn_tiles() or bool(torch.cpu._init_amx())
        self._way_bits = library.warmturn_way_bits
        self._way_bits.argtypes = [ctypes.c_int64, ctypes.c_int64]
        self.together: int = library.warmturn_together()  # elements of a column, see kernels/packed.h
        self.build = path.stem
        self._read = library.warmturn_read
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
        self._order = library.warmturn_order
        self._order.argtypes = [ctypes.POINTER(_Codes)]
        self._place_numbers = library.warmturn_place_numbers
        self._place_numbers.argtypes = [ctypes.POINTER(_Numbers)]
        self._ways = (ctypes.c_int64 * 3).in_dll(library, "warmturn_chosen_ways")
        self._activation_bytes = ctypes.c_int64.in_dll(library, "warmturn_activation_bytes")
        self._skips_products = ctypes.c_int64.in_dll(library, "warmturn_skips_products")
        self.adapters = Adapters()
        self.low_rows = 0  # rows of a chunk times products of a program, at most
        self.memory = 0  # its address
        self.rooms: dict[Any, Any] = {}  # see ``layer_program.LayerWorkspace``
        self._memory = torch.zeros(0)

    @property
    def ways(self) -> tuple[int, int, int]:
        """How products go through a weight, of 1 row, of few and of many: bits of kernels/ways.h."""
        one, few, many = self._ways
        return one, few, many

    @ways.setter
    def ways(self, chosen: tuple[int, int, int]) -> None:
        self._ways[:] = list(chosen)

    def ways_through(self, packed: bool, rows: int) -> list[int]:
        """All that ``ways`` may be for so many rows, times weights of few bits or times tiles."""
        bits = self._way_bits(packed, rows)
        return [way for way in range(bits + 1) if way & ~bits == 0]

    @property
    def multiplies_bytes(self) -> bool:
        """Whether products with packed weights multiply bytes, and so take inputs of one byte in half the time."""
        return self.together == 4

    @property
    def activation_bytes(self) -> int:
        """To how many bytes products with packed weights round their inputs: 2, or 1."""
        return self._activation_bytes.value

    @activation_bytes.setter
    def activation_bytes(self, count: int) -> None:
        self._activation_bytes.value = count

    @contextmanager
    def without_products(self) -> Iterator[None]:
        """Within it results of all products of this process are zeros, and no weight is read."""
        self._skips_products.value = 1
        try:
            yield
        finally:
            self._skips_products.value = 0

    def read(self, tensors: Sequence[torch.Tensor]) -> None:
        """Read all bytes of contiguous CPU tensors of any shape, computing nothing: what products are compared with."""
        regions = np.array([(tensor.data_ptr(), tensor.nbytes) for tensor in tensors], np.int64)
        self._read(regions.ctypes.data, len(tensors), min(torch.get_num_threads(), self.threads), self.team)

    def order(self, rows: PackedRows | StoredRows, inside: int, places: CodePlaces, to: torch.Tensor) -> None:
        """Put the codes of rows, of ``inside`` elements each, where products read them: into uint8 ``to [groups of 64
        rows, bytes]``, whose rows are contiguous. A group with fewer rows is padded with zeros.
        """
        layout, flipped = rows.layout, rows.layout.flipped ^ places.flipped
        fields = np.array(layout.fields, np.int64)
        source = (fields.ctypes.data, len(fields), layout.elements, layout.nbytes)
        values, how = rows.values.contiguous(), (places.bits, places.together, flipped)
        where = (to.data_ptr(), places.step, places.head, places.coarse, places.every, to.stride(0))
        self._order(_Codes(values.data_ptr(), *values.shape, inside, *source, *how, *where))

    def place_numbers(self, rows: StoredRows, inside: int, parts: int, places: CodePlaces, to: torch.Tensor) -> None:
        """Put the scales and minima of the same rows there too. ``parts``: how many of them 32 elements have."""
        scales, layout = rows.scales, rows.layout
        bits = np.array([*scales.fine, *scales.minima], np.int64)
        about = (inside, layout.elements, layout.nbytes, len(scales.halves), _TWO(*scales.halves), bits.ctypes.data)
        rest = (_TWO(len(scales.fine), len(scales.minima)), scales.less, 0x8000 if scales.negated else 0, parts)
        values, where = rows.values.contiguous(), (to.data_ptr(), places.step, places.coarse, to.stride(0))
        self._place_numbers(_Numbers(values.data_ptr(), *values.shape, *about, *rest, *where))

    def reserve(self, floats: int) -> None:
        """Grow the shared memory to at least ``floats``; its address may change."""
        if self._memory.numel() < floats + _ALIGNED:
            self._memory = torch.zeros(floats + _ALIGNED)
            self.memory = -(-self._memory.data_ptr() // 64) * 64


@cache
def kernel() -> ProgramKernel | None:
    """The kernel of this process, compiled if necessary. If it cannot be had: None, and a line in the log, once."""
    try:
        return ProgramKernel(build(Path(__file__).with_name("kernels") / "program.cpp"))
    except (NotBuilt, OSError, AttributeError) as error:
        reason = error if isinstance(error, NotBuilt) else "the compiled file cannot be loaded"
        log.info("modules run uncompiled, which is slower on a CPU: %s", reason)
        return None


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(0 if kernel() is not None else 1)
