"""`IntegerSource`: a weight of whole numbers with a scale and a zero for each group of inputs, as a `PackedSource`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from scheduler.weights.packed_source import PackedRows
from scheduler.weights.packed_values import in_order, unpack


class IntegerSource:
    """``w = scale * (code - zero)``. The checkpoint's tensors are kept, and codes are taken from them when rows are
    read.
    """

    table: tuple[float, ...] | None = None

    def __init__(
        self,
        codes: Callable[[int, int], torch.Tensor],
        inside: int,
        bits: int,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        groups: torch.Tensor | None,
        nbytes: int,
        minima: torch.Tensor | None = None,
    ) -> None:
        """``codes(start, stop)`` gives uint8 ``[rows, inside]``. ``scales``: floats ``[out, inside / group]``.
        ``zeros``: integers of that shape, None: ``2 ** (bits - 1)``. ``groups``: which group each input is of,
        integers ``[inside]``; None: they are in order. ``nbytes``: of the tensors. ``minima``: floats of
        that shape, which are subtracted, instead of zeros. Raises ``ValueError`` for groups of
        different sizes.
        """
        self._codes, self.inside, self.bits, self.nbytes = codes, inside, bits, nbytes
        self.out, count = scales.shape
        if inside % count:
            raise ValueError(f"a packed weight has {count} groups for {inside} inputs")
        self.group, self.order = inside // count, _order(groups, count)
        self._scales, self.zero, self._zeros, self._minima = scales, 1 << (bits - 1), None, minima
        if zeros is not None:
            if zeros.shape != scales.shape:
                raise ValueError("a packed weight has other groups for zeros than for scales")
            least, most = int(zeros.min()), int(zeros.max())
            self.zero = (least + most) // 2
            self._zeros = (zeros - self.zero).to(torch.int16) if least != most else None

    def rows(self, start: int, stop: int) -> PackedRows:
        """Rows ``start`` to ``stop``, packed."""
        values, scales = self._codes(start, stop), self._scales[start:stop].float()
        if self.order is not None:
            values = values[:, self.order]
        if self._minima is not None:
            return PackedRows(values, scales, self._minima[start:stop].float())
        if self._zeros is None:
            return PackedRows(values, scales)
        zeros = self._zeros[start:stop]
        if self.bits < 8:
            return PackedRows(values, scales, zeros=zeros.to(torch.int8))
        return PackedRows(values, scales, scales * zeros)  # a zero of 8 bits may be 128 away

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of int64 ``ids [n]``: float32 ``[n, inside]``."""
        return torch.cat([self.dequantise(row, row + 1) for row in ids.tolist()])

    def dequantise(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop``: float32 ``[rows, inside]``, columns in the order of the inputs."""
        return in_order(unpack(self.rows(start, stop), self.zero, self.table), self.order)


def _order(groups: torch.Tensor | None, count: int) -> torch.Tensor | None:
    """int64 ``[inside]``: inputs with those of a group together; None if they are so. Raises ``ValueError``."""
    if groups is None or bool((groups[1:] >= groups[:-1]).all()):
        return None
    sizes = torch.bincount(groups.long(), minlength=count)
    if len(sizes) != count or int(sizes.min()) != int(sizes.max()):
        raise ValueError("the groups of a packed weight have different sizes")
    return torch.argsort(groups.long(), stable=True)


def from_stream(data: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of ``bits`` each that follow each other, lowest bits first: uint8 ``[rows, n]`` of bytes ``[rows, m]``."""
    if bits == 8:
        return data
    if bits == 4:
        return torch.stack([data & 15, data >> 4], -1).flatten(1)
    first = torch.arange(data.shape[1] * 8 // bits) * bits
    wide = torch.nn.functional.pad(data, (0, 1)).int()
    both = wide[:, first // 8] | wide[:, first // 8 + 1] << 8
    return (both >> (first % 8) & ((1 << bits) - 1)).to(torch.uint8)


def from_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of which each int32 holds as many whole ones as fit: uint8 ``[rows, n]`` of ``[rows, m]``, lowest bits
    first.
    """
    shifts = torch.arange(32 // bits) * bits
    return (words[..., None] >> shifts & ((1 << bits) - 1)).flatten(1).to(torch.uint8)
