"""`JoinedSource`: rows of several packed weights as one, in any order: of experts, or of products that are fused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from scheduler.weights.packed_source import PackedRows, PackedSource
from scheduler.weights.packed_values import in_order, unpack

_NUMBERS = [field.name for field in fields(PackedRows) if field.name not in ("values", "layout")]


class JoinedSource:
    """Rows of packed weights of one kind, a `PackedSource`."""

    def __init__(self, sources: Sequence[PackedSource], index: torch.Tensor) -> None:
        """``index``: int64 ``[out]``, which row of the sources, one after the other, each row is. Raises ``ValueError``
        for sources of different kinds.
        """
        first = sources[0]
        kinds = {(one.bits, one.group, one.inside, one.table) for one in sources}
        orders = [one.order is not None for one in sources]
        if len(kinds) > 1 or (any(orders) and not all(_same(one.order, first.order) for one in sources)):
            raise ValueError("the packed weights of one module are packed in different ways")
        self.bits, self.group, self.zero = first.bits, first.group, first.zero
        self.table, self.order = first.table, first.order
        self.out, self.inside = len(index), first.inside
        self._sources, self._index = sources, index
        self._starts = [0]
        for one in sources:
            self._starts.append(self._starts[-1] + one.out)
        self.nbytes = sum(one.nbytes for one in sources) * self.out // self._starts[-1]
        samples = [one.rows(0, 1) for one in sources]
        self._zeros = any(one.zero != first.zero for one in sources) or any(one.zeros is not None for one in samples)
        self._minima = any(one.minima is not None for one in samples) or (self._zeros and self.bits > 6)

    def rows(self, start: int, stop: int) -> PackedRows:
        """Rows ``start`` to ``stop``, packed."""
        return self._rows(self._index[start:stop])

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of int64 ``ids [n]``: float32 ``[n, inside]``."""
        return in_order(unpack(self._rows(self._index[ids]), self.zero, self.table), self.order)

    def dequantise(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop``: float32 ``[rows, inside]``, columns in the order of the inputs."""
        return in_order(unpack(self.rows(start, stop), self.zero, self.table), self.order)

    def _rows(self, numbers: torch.Tensor) -> PackedRows:
        runs = list(self._runs(numbers))
        if len(runs) == 1:
            return runs[0]
        more: dict[str, Any] = {name: _join([getattr(run, name) for run in runs]) for name in _NUMBERS}
        if len({run.layout for run in runs}) > 1:
            return PackedRows(torch.cat([run.codes for run in runs]), **more)
        return PackedRows(torch.cat([run.values for run in runs]), **more, layout=runs[0].layout)

    def _runs(self, numbers: torch.Tensor) -> Iterator[PackedRows]:
        """What follows each other in a source, a run at a time."""
        wanted, at, place = numbers.tolist(), 0, 0
        while at < len(wanted):
            while not self._starts[place] <= wanted[at] < self._starts[place + 1]:
                place = (place + 1) % len(self._sources)
            end, last = at + 1, self._starts[place + 1]
            while end < len(wanted) and wanted[end] == wanted[end - 1] + 1 and wanted[end] < last:
                end += 1
            start = wanted[at] - self._starts[place]
            yield self._alike(self._sources[place], start, start + end - at)
            at = end

    def _alike(self, source: PackedSource, start: int, stop: int) -> PackedRows:
        """Rows of a source with the zero of the first, and with what others have."""
        rows = source.rows(start, stop)
        if not self._zeros and not self._minima:
            return rows
        scales = rows.scales
        if scales is None:
            raise ValueError("the packed weights of one module are packed in different ways")
        zeros = torch.zeros(scales.shape, dtype=torch.int16) if rows.zeros is None else rows.zeros.short()
        zeros = zeros + (source.zero - self.zero)
        if not self._minima:
            return replace(rows, zeros=zeros.to(torch.int8))
        least = scales * zeros
        return replace(rows, zeros=None, minima=least if rows.minima is None else rows.minima + least)


def _join(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)
