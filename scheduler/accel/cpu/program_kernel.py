"""``ProgramKernel``: the compiled functions of ``kernels/program.cpp``."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cache.attention.cpu import team_address
from cache.compiler import NotBuilt, build
from scheduler.accel.cpu.matrix import GROUP

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


class _Codes(ctypes.Structure):
    """The struct ``Codes`` of codes.h."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("columns", "inside", "bits", "together", "flipped")),
        ("to", ctypes.c_void_p),
    )


class ProgramKernel:
    """The compiled functions, and the memory that all programs share, as they run one after the other."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.run, self.attend_between = library.warmturn_run, library.warmturn_attend_between
        self.chain = library.warmturn_chain
        self.run.argtypes = [ctypes.c_void_p]
        self.attend_between.argtypes = [ctypes.c_void_p] * 3
        self.chain.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self.team = team_address()
        self.threads = max(torch.get_num_threads(), os.cpu_count() or 1) if self.team else 1  # at most
        self.tiles = not library.warmturn_tiles() or bool(torch.cpu._init_amx())
        self.way_count: int = library.warmturn_way_count()  # see ``warmturn_chosen_ways`` in kernels/tiled.h
        self.together: int = library.warmturn_together()  # elements of a column, see kernels/packed.h
        self.build = path.stem
        self._read = library.warmturn_read
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
        self._order = library.warmturn_order
        self._order.argtypes = [ctypes.POINTER(_Codes)]
        self._ways = (ctypes.c_int64 * 3).in_dll(library, "warmturn_chosen_ways")
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

    def read(self, tensors: Sequence[torch.Tensor]) -> None:
        """Read all bytes of contiguous CPU tensors of any shape, computing nothing: what products are compared with."""
        regions = np.array([(tensor.data_ptr(), tensor.nbytes) for tensor in tensors], np.int64)
        self._read(regions.ctypes.data, len(tensors), min(torch.get_num_threads(), self.threads), self.team)

    def order(self, codes: torch.Tensor, bits: int, together: int, flipped: int = 0) -> torch.Tensor:
        """Codes as products read them, uint8 ``[groups of 64 columns, blocks of 32 elements, 8 * bits * 32]``: of each
        column ``together`` elements after each other. ``codes``: uint8 ``[columns, inside]``; the last group is padded
        with zeros. ``flipped``: bits that are stored the other way round.
        """
        some = [one.contiguous() for one in torch.split(codes, GROUP)]
        to = torch.empty(len(some), -(-codes.shape[1] // 32), 256 * bits, dtype=torch.uint8)
        for one, place in zip(some, to, strict=True):
            self._order(_Codes(one.data_ptr(), *one.shape, bits, together, flipped, place.data_ptr()))
        return to

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
