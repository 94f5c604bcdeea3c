"""`RealForm`: how 64 columns of a packed weight lie in memory whose values are no whole numbers, for kernels/real.h."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from scheduler.accel.cpu.matrix import GROUP, PACKED
from scheduler.accel.cpu.packed_form import BLOCK, NIBBLES, TABLE_BYTES, NotPackable, as_columns
from scheduler.accel.cpu.program_kernel import CodePlaces, kernel
from scheduler.weights.packed_source import PackedSource
from scheduler.weights.packed_values import E4M3

_REAL, _SCALES = 1 << 20, 21  # of a type: a bit, and where the logarithm of ``every`` is
_MOST_EVERY = 8  # blocks with a scale in common


@dataclass(frozen=True)
class RealForm:
    """Block after block of 32 elements of each column, some of which begin with float32 scales."""

    table: tuple[float, ...]  # of 16 numbers; empty: values are floats of 8 bits (e4m3)
    every: int  # so many blocks have a scale in common: 1, 2, 4 or 8

    @classmethod
    def of(cls, source: PackedSource) -> RealForm | None:
        """The form of a weight, None for one of whole numbers. Raises ``NotPackable``."""
        if source.table is None or all(value == int(value) and -128 <= value <= 127 for value in source.table):
            return None
        eight = source.table == E4M3
        if source.bits != (8 if eight else 4) or len(source.table) != 1 << source.bits:
            raise NotPackable("its values are no whole numbers")
        if source.group % BLOCK:
            raise NotPackable(f"{source.group} elements have a scale in common")
        every = 1
        while every < _MOST_EVERY and source.group % (2 * every * BLOCK) == 0:
            every *= 2
        return cls(() if eight else source.table, every)

    @property
    def type(self) -> int:
        """The number by which the kernel knows it."""
        return PACKED | _REAL | bool(self.table) * NIBBLES | (self.every.bit_length() - 1) << _SCALES

    def nbytes(self, inside: int) -> int:
        """Bytes of 64 columns."""
        blocks = inside // BLOCK
        return self._before + blocks // self.every * GROUP * 4 + blocks * self._of_values

    @property
    def _before(self) -> int:
        return TABLE_BYTES if self.table else 0

    @property
    def _of_values(self) -> int:
        """Bytes of the values of a block."""
        return BLOCK * GROUP // (2 if self.table else 1)

    def pack(self, source: PackedSource, start: int, stop: int, to: torch.Tensor) -> None:
        """Write some rows to uint8 ``to [groups, nbytes]``, 64 to a group; the last one is padded. Raises
        ``NotPackable``.
        """
        rows, found = source.rows(start, stop), kernel()
        if rows.scales is None or found is None:
            raise NotPackable("it has no scales" if found else "there is no kernel that would read it")
        if self.table:
            to[:, :TABLE_BYTES] = torch.tensor(self.table, dtype=torch.float32).view(torch.uint8)
        to = to[:, self._before :]
        bits, scales = 4 if self.table else 8, GROUP * 4
        found.order(rows, source.inside, CodePlaces(bits, 1, self._of_values, 0, scales, self.every), to)
        columns = as_columns(rows.scales.repeat_interleave(source.group // (self.every * BLOCK), 1))
        to.view(*columns.shape[:2], -1)[:, :, :scales] = columns.view(torch.uint8)

    def values(self, group: torch.Tensor, inside: int) -> torch.Tensor:
        """The reverse of ``packed``: float32 ``[64, inside]``."""
        parts = group[self._before :].view(inside // (self.every * BLOCK), -1)
        scales, codes = parts[:, : GROUP * 4].contiguous().view(torch.float32), parts[:, GROUP * 4 :]
        codes = codes.reshape(len(parts), -1, GROUP)
        if self.table:
            codes = torch.stack([codes & 15, codes >> 4], 2).view(len(parts), -1, GROUP)
        values = torch.tensor(self.table or E4M3, dtype=torch.float32)[codes.int()]
        return (values * scales[:, None]).view(-1, GROUP).t()
