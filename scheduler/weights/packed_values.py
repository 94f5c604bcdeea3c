"""The float32 values of packed rows, and sources that are made of other sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from scheduler.weights.packed_source import PackedRows, PackedSource


def unpacked(rows: PackedRows, zero: int, table: tuple[float, ...] | None) -> torch.Tensor:
    """float32 ``[rows, inside]``: ``scale * (value - zero) - minimum``, or ``scale * table[value]``."""
    scales = _multiplied(rows.scales, rows.coarse_scales, rows.fine_scales)
    minima = _multiplied(rows.minima, rows.coarse_minima, rows.fine_minima)
    if scales is None:
        raise ValueError("packed rows have no scales")
    if table is not None:
        values = torch.tensor(table, dtype=torch.float32)[rows.values.int()]
    else:
        values = rows.values.float() - zero
    values = values.view(*scales.shape, -1) * scales[..., None]
    if minima is not None:
        values -= minima[..., None]
    return values.view(rows.values.shape)


def _multiplied(
    whole: torch.Tensor | None, coarse: torch.Tensor | None, fine: torch.Tensor | None
) -> torch.Tensor | None:
    """``[rows, groups]``; ``coarse`` has one number for several groups of ``fine``."""
    if coarse is None or fine is None:
        return whole
    return (coarse[..., None] * fine.view(*coarse.shape, -1)).view(fine.shape)


class JoinedSource:
    """Several sources of one format as one, their rows one after the other."""

    def __init__(self, parts: Sequence[PackedSource]) -> None:
        """Raises ``ValueError`` where the parts do not have one format."""
        first = parts[0]
        self.inside, self.bits, self.group = first.inside, first.bits, first.group
        self.zero, self.table, self.order = first.zero, first.table, first.order
        if any(_form(each) != _form(first) or each.order is not first.order for each in parts):
            raise ValueError("the parts of a packed weight have different formats")
        self.out = sum(each.out for each in parts)
        self._parts = tuple(parts)

    def rows(self, start: int, stop: int) -> PackedRows:
        """Rows ``start`` to ``stop``, packed."""
        found = [part.rows(low, high) for part, low, high in self._pieces(start, stop)]
        if len(found) == 1:
            return found[0]
        joined: dict[str, Any] = {}
        for field in fields(PackedRows):
            pieces = [getattr(each, field.name) for each in found]
            joined[field.name] = None if pieces[0] is None else torch.cat(pieces)
        return PackedRows(**joined)

    def dequantise(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop``: float32 ``[rows, inside]``."""
        return torch.cat([part.dequantise(low, high) for part, low, high in self._pieces(start, stop)])

    def _pieces(self, start: int, stop: int) -> list[tuple[PackedSource, int, int]]:
        pieces, at = [], 0
        for part in self._parts:
            low, high = max(start - at, 0), min(stop - at, part.out)
            if low < high:
                pieces.append((part, low, high))
            at += part.out
        return pieces


def _form(source: PackedSource) -> tuple[object, ...]:
    return source.inside, source.bits, source.group, source.zero, source.table
