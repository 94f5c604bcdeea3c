"""`RoundedSource`: a plain weight as a `PackedSource` of 8 or 4 bits.

Of 8 bits: the largest of each 32 elements is 127 times their scale. Of 4 bits: 32 elements have a scale and a minimum,
first those of their extremes, then those that fit the codes best (least squares).
"""

from __future__ import annotations

import torch

from scheduler.weights.packed_source import PackedRows
from scheduler.weights.packed_values import unpack

GROUP = 32
_LARGEST, _SMALLEST = 3e4, 1e-3  # of a group's values, between which scales are rounded to float16


class RoundedSource:
    """The rows of a plain weight, rounded when they are read."""

    table: tuple[float, ...] | None = None
    order: torch.Tensor | None = None
    group = GROUP

    def __init__(self, weight: torch.Tensor, bits: int) -> None:
        """``weight [..., out, inside]``, of floats; ``inside`` is a multiple of 32. ``bits``: 8 or 4."""
        self._weight, self.bits = weight, bits
        self._each, self.inside = weight.shape[-2:]
        self.out = weight.numel() // self.inside
        self.zero = 128 if bits == 8 else 0
        most = float(weight.abs().amax())
        self._half = _SMALLEST <= most <= _LARGEST
        scales = (1 if bits == 8 else 2) * (2 if self._half else 4)
        self.nbytes = self.out * self.inside // GROUP * (GROUP * bits // 8 + scales)

    def rows(self, start: int, stop: int) -> PackedRows:
        """Rows ``start`` to ``stop``, packed."""
        return self._pack(self._rows(torch.arange(start, stop)))

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of int64 ``ids [n]``: float32 ``[n, inside]``."""
        return unpack(self._pack(self._rows(ids)), self.zero, self.table)

    def dequantise(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop``: float32 ``[rows, inside]``."""
        return unpack(self.rows(start, stop), self.zero, self.table)

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        weight = self._weight
        found = weight[ids] if weight.dim() == 2 else weight[ids // self._each, ids % self._each]
        return found.float()

    def _pack(self, rows: torch.Tensor) -> PackedRows:
        groups = rows.view(len(rows), -1, GROUP)
        return self._eight(groups) if self.bits == 8 else self._four(groups)

    def _eight(self, groups: torch.Tensor) -> PackedRows:
        scales = self._number(groups.abs().amax(-1) / 127)
        codes = (groups / _divisor(scales)).round_().clamp_(-127, 127) + 128
        return PackedRows(codes.flatten(1).to(torch.uint8), scales)

    def _four(self, groups: torch.Tensor) -> PackedRows:
        low, high = groups.aminmax(dim=-1)
        codes = _codes(groups, self._number((high - low) / 15), self._number(low))
        apart = codes - codes.mean(-1, keepdim=True)
        mean = groups.mean(-1, keepdim=True)
        scales = (apart * (groups - mean)).sum(-1) / apart.square().sum(-1).clamp_min(1.0)
        scales = self._number(scales.clamp_min(0))
        least = self._number(mean[..., 0] - scales * codes.mean(-1))
        codes = _codes(groups, scales, least)
        return PackedRows(codes.flatten(1).to(torch.uint8), scales, -least)

    def _number(self, values: torch.Tensor) -> torch.Tensor:
        return values.half().float() if self._half else values


def _codes(groups: torch.Tensor, scales: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    return ((groups - least[..., None]) / _divisor(scales)).round_().clamp_(0, 15)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """``[..., 1]``, where zeros give codes of zero distance instead of no number."""
    return torch.where(scales == 0, torch.inf, scales)[..., None]
