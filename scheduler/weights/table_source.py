"""`TableSource`: a weight of codes for the numbers of a table, with a scale for each group of inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from scheduler.weights.packed_source import PackedRows
from scheduler.weights.packed_values import unpack

Rows = Callable[[int, int], torch.Tensor]


class TableSource:
    """``w = scale * table[code]``, a `PackedSource`. The checkpoint's tensors are kept, and codes and scales are taken
    from them when rows are read.
    """

    zero = 0
    order: torch.Tensor | None = None

    def __init__(
        self,
        codes: Rows,
        scales: Rows,
        shape: tuple[int, int],
        bits: int,
        group: int,
        table: tuple[float, ...],
        nbytes: int,
    ) -> None:
        """``codes(start, stop)`` gives uint8 ``[rows, inside]``, ``scales`` float32 ``[rows, inside / group]``.
        ``nbytes``: of the tensors. Raises ``ValueError`` where a row is not a whole number of groups.
        """
        self._codes, self._scales = codes, scales
        self.out, self.inside = shape
        self.bits, self.group, self.nbytes = bits, group, nbytes
        self.table: tuple[float, ...] | None = table
        if self.inside % group:
            raise ValueError(f"a packed weight has groups of {group} for {self.inside} inputs")

    def rows(self, start: int, stop: int) -> PackedRows:
        """Rows ``start`` to ``stop``, packed."""
        return PackedRows(self._codes(start, stop), self._scales(start, stop))

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of int64 ``ids [n]``: float32 ``[n, inside]``."""
        return torch.cat([self.dequantise(row, row + 1) for row in ids.tolist()])

    def dequantise(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop``: float32 ``[rows, inside]``."""
        return unpack(self.rows(start, stop), self.zero, self.table)
