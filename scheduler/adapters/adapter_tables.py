"""``AdapterTables``: adapters as the C++ kernel of programs reads them."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from cache.memory import huge
from scheduler.accel.cpu.matrix import TYPES
from scheduler.accel.cpu.packing import Packing
from scheduler.accel.cpu.program_kernel import ProgramKernel
from scheduler.adapters.adapter import Adapter

Owners = npt.NDArray[np.int64]  # the number of each row's adapter among those of the step; -1: none
_MAP = np.dtype([("down", "i8"), ("up", "i8"), ("rank", "i8"), ("type", "i8"), ("scale", "f8")])  # LowRank, low_rank.h


class AdapterTables:
    """The pairs of adapters by the numbers of the weights that programs multiply with. One step at a time is told to
    the kernel.
    """

    def __init__(self, packing: Packing, kernel: ProgramKernel) -> None:
        self._packing, self._kernel = packing, kernel
        self._tables: WeakKeyDictionary[Adapter, tuple[npt.NDArray[np.void], list[torch.Tensor]]] = WeakKeyDictionary()
        self._low = torch.zeros(0)
        self._told: tuple[object, ...] = ()  # what the kernel reads now

    def set(self, adapters: Sequence[Adapter], owners: Owners | None) -> None:
        """Programs add what these adapters add to their rows; None: nothing."""
        told = self._kernel.adapters
        if owners is None:
            told.of_row, self._told = None, ()
            return
        maps = np.concatenate([self._table(adapter) for adapter in adapters])
        most = max(adapter.rank for adapter in adapters)
        if self._low.numel() < self._kernel.low_rows * most:
            self._low = torch.empty(self._kernel.low_rows * most)
        told.of_row, told.maps, told.weights = owners.ctypes.data, maps.ctypes.data, self._packing.numbers
        told.most, told.low = most, self._low.data_ptr()
        self._told = owners, maps

    def _table(self, adapter: Adapter) -> npt.NDArray[np.void]:
        """The pairs of an adapter, ``[weights]``; of rank 0 where it has none."""
        if adapter not in self._tables:
            table, alive = np.zeros(self._packing.numbers, _MAP), []
            for module, pair in adapter.pairs.items():
                if (found := self._packing.matrix(module)) is None:
                    continue  # no program multiplies with it
                order = found[0].order
                down = pair.down if order is None else pair.down[:, torch.from_numpy(order)]
                down, up = in_strips(down, 4, 16), in_strips(pair.up, 32, 1)
                alive += [down, up]
                table[found[0].number] = (down.data_ptr(), up.data_ptr(), pair.rank, TYPES[down.dtype], pair.scale)
            self._tables[adapter] = table, alive
        return self._tables[adapter][0]


def in_strips(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """``[m, n]`` in the order of ``[m / rows, n / columns, rows, columns]``, filled with zeros where its sides are no
    multiples of these: as low_rank.h reads it.
    """
    m, n = matrix.shape
    filled = F.pad(matrix, (0, -n % columns, 0, -m % rows))
    strips = filled.view(-1, rows, filled.shape[1] // columns, columns).transpose(1, 2)
    return huge.empty(strips.numel(), strips.dtype).view(strips.shape).copy_(strips)
