"""``HeldSource``: a packed weight whose rows are all in memory, for benchmarks and tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from scheduler.weights.packed_source import PackedRows
from scheduler.weights.packed_values import in_order, unpack


class HeldSource:
    """A `PackedSource`; what inherits from it sets these."""

    all: PackedRows
    out: int
    inside: int
    bits: int
    zero: int
    table: tuple[float, ...] | None
    order: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of the codes."""
        return self.out * self.inside * self.bits // 8

    def rows(self, start: int, stop: int) -> PackedRows:
        """Rows ``start`` to ``stop``, packed."""
        return self._some(slice(start, stop))

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of int64 ``ids [n]``: float32 ``[n, inside]``."""
        return in_order(unpack(self._some(ids), self.zero, self.table), self.order)

    def dequantise(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop``: float32 ``[rows, inside]``."""
        return in_order(unpack(self.rows(start, stop), self.zero, self.table), self.order)

    def _some(self, index: Any) -> PackedRows:
        parts = {name: part for name, part in vars(self.all).items() if isinstance(part, torch.Tensor)}
        changed: dict[str, Any] = {name: part[index] for name, part in parts.items()}
        return replace(self.all, **changed)
