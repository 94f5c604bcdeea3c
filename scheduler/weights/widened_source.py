"""`WidenedSource`: a packed weight in a form that holds several kinds, so that `JoinedSource` can join them.

Values stay as they are: codes get more bits or another zero, groups become smaller, and types without minima get
minima of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scheduler.weights.packed_source import PackedRows, PackedSource
from scheduler.weights.packed_values import multiply_levels


@dataclass(frozen=True)
class _CommonForm:
    bits: int
    group: int
    zero: int
    fine: bool  # scales of two levels
    minima: bool


class WidenedSource:
    """The rows of a packed weight in another form, a `PackedSource`."""

    table: tuple[float, ...] | None = None
    order: torch.Tensor | None = None

    def __init__(self, source: PackedSource, form: _CommonForm) -> None:
        """See ``widen``."""
        self._source, self._form = source, form
        self._codes = torch.tensor([value + form.zero for value in _values(source)], dtype=torch.uint8)
        self.bits, self.group, self.zero = form.bits, form.group, form.zero
        self.out, self.inside, self.nbytes = source.out, source.inside, source.nbytes

    def rows(self, start: int, stop: int) -> PackedRows:
        """Rows ``start`` to ``stop``, packed."""
        rows, repeat = self._source.rows(start, stop), self._source.group // self.group
        codes = self._codes[rows.codes.int()]
        scales, minima = rows.fine_scales, rows.fine_minima
        if not self._form.fine:
            scales = multiply_levels(rows.scales, rows.coarse_scales, rows.fine_scales)
            minima = multiply_levels(rows.minima, rows.coarse_minima, rows.fine_minima)
        if scales is None:
            raise ValueError("packed rows have no scales")
        coarse = rows.coarse_minima
        if self._form.minima and minima is None:
            minima = torch.zeros_like(scales)
            coarse = None if rows.coarse_scales is None else torch.zeros_like(rows.coarse_scales)
        scales = scales.repeat_interleave(repeat, 1)
        minima = None if minima is None else minima.repeat_interleave(repeat, 1)
        if not self._form.fine:
            return PackedRows(codes, scales, minima)
        return PackedRows(codes, None, None, rows.coarse_scales, scales, coarse, minima)

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of int64 ``ids [n]``: float32 ``[n, inside]``."""
        return self._source.take(ids)

    def dequantise(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop``: float32 ``[rows, inside]``."""
        return self._source.dequantise(start, stop)


def widen(sources: Sequence[PackedSource]) -> list[WidenedSource]:
    """Packed weights in one form: with the bits that all their values need, and the smallest groups. Raises
    ``ValueError`` where no form of at most 8 bits holds them, and for zeros of groups and columns in another order.
    """
    samples = [source.rows(0, 1) for source in sources]
    if any(source.order is not None for source in sources) or any(sample.zeros is not None for sample in samples):
        raise ValueError("packed weights with zeros of their groups or in another order are not widened")
    values = [value for source in sources for value in _values(source)]
    zero, group = -min(values), min(source.group for source in sources)
    bits = (max(values) + zero).bit_length()
    if bits > 8 or any(source.group % group for source in sources):
        raise ValueError("no form holds the packed weights")
    fine = all(sample.fine_scales is not None for sample in samples)
    minima = any(sample.minima is not None or sample.fine_minima is not None for sample in samples)
    form = _CommonForm(bits, group, zero, fine, minima)
    return [WidenedSource(source, form) for source in sources]


def _values(source: PackedSource) -> list[int]:
    """The whole number that each code stands for. Raises ``ValueError`` if one is not whole."""
    if source.table is None:
        return list(range(-source.zero, (1 << source.bits) - source.zero))
    if any(value != int(value) for value in source.table):
        raise ValueError("packed weights whose values are no whole numbers are not widened")
    return [int(value) for value in source.table]
