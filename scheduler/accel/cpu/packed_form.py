"""`PackedForm`: how 64 columns of a packed weight of whole numbers lie in memory, for kernels/packed.h."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from scheduler.accel.cpu.matrix import GROUP, PACKED
from scheduler.accel.cpu.program_kernel import CodePlaces, kernel
from scheduler.weights.code_layout import ONE_TO_A_BYTE
from scheduler.weights.packed_source import PackedRows, PackedSource
from scheduler.weights.scale_layout import StoredSource

NIBBLES = 1  # of a type beside PACKED: values of 4 bits, see kernels/packed.h
_FLOATS, _FINE, _MINIMA, _SHORT, _ZEROS, _LOOKUP = 2, 4, 8, 32, 64, 128
BLOCK = 32  # elements of a row that lie together
TABLE_BYTES = 64
_COARSE = 256  # elements of a row that have a coarse scale in common


class NotPackable(ValueError):
    """A packed weight has no form that the kernel reads."""


class NotHalf(Exception):
    """A scale or a minimum is no number of float16."""


@dataclass(frozen=True)
class PackedForm:
    """Block after block of 32 elements of each column; before them a table, where values are of one."""

    bits: int  # 4, 5, 6 or 8
    group: int  # 16 or 32 elements with one scale
    floats: bool  # scales in float32, else in float16
    fine: bool  # scales of two levels
    minima: bool
    zeros: bool  # minima are whole numbers of scales
    zero: int  # that is subtracted from what is stored, -128 to 127
    together: int  # elements of a column that lie so: 2, or 4, and then bytes are stored without a sign
    table: tuple[int, ...] = ()  # what the values stand for, where they are of 4 bits and of one

    @classmethod
    def of(cls, source: PackedSource) -> PackedForm:
        """The form of a weight. Raises ``NotPackable``."""
        group = min(source.group, BLOCK)
        if group not in (16, BLOCK) or source.group % group:
            raise NotPackable(f"{source.group} elements have a scale in common")
        if not _is_whole(source):
            raise NotPackable("its values are no whole numbers")
        bits, table = _stored_bits(source), tuple(int(value) for value in source.table or ())
        if bits == 5 and group < BLOCK:
            bits = 6  # eight tuples have their fifth bits together, and a scale may be of four
        zero = 0 if table else source.zero - (128 if bits == 8 else 0)
        if not -128 <= zero <= 127:
            raise NotPackable(f"its zero is {source.zero}")
        sample = source.rows(0, min(GROUP, source.out))
        fine = sample.fine_scales is not None and source.inside % _COARSE == 0 and source.group == group
        zeros = sample.zeros is not None
        minima = zeros or sample.minima is not None or sample.fine_minima is not None
        found = kernel()
        if found is None:
            raise NotPackable("there is no kernel that would read it")
        return cls(bits, group, False, fine, minima, zeros, zero, found.together, table if bits == 4 else ())

    @property
    def exact(self) -> PackedForm:
        """The same with scales in float32."""
        return replace(self, floats=True)

    @property
    def type(self) -> int:
        """The number by which the kernel knows it."""
        flags = PACKED if self.bits == 8 else PACKED | NIBBLES | self.bits - 4 << 16
        flags |= self.floats * _FLOATS | self.fine * _FINE
        flags |= self.minima * _MINIMA | self.zeros * _ZEROS | (self.group == 16) * _SHORT | bool(self.table) * _LOOKUP
        return flags | (self.zero & 255) << 8

    def nbytes(self, inside: int) -> int:
        """Bytes of 64 columns."""
        return self._before + inside // _COARSE * self._of_coarse + -(-inside // BLOCK) * self._of_block

    @property
    def _before(self) -> int:
        """Bytes of the table."""
        return TABLE_BYTES if self.table else 0

    @property
    def _dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Of scales and of minima."""
        scales = torch.int8 if self.fine else torch.float32 if self.floats else torch.float16
        return scales, torch.int8 if self.zeros else scales

    @property
    def _sizes(self) -> tuple[int, int]:
        """Bytes of the scales and of the minima of a block of 64 columns."""
        count, (scales, minima) = GROUP * (BLOCK // self.group), self._dtypes
        return count * scales.itemsize, count * minima.itemsize * self.minima

    def pack(self, source: PackedSource, start: int, stop: int, to: torch.Tensor) -> None:
        """Write some rows to uint8 ``to [groups, nbytes]``, 64 to a group; the last one is padded."""
        found = kernel()
        assert found is not None
        stored = source.stored(start, stop) if isinstance(source, StoredSource) and not self.floats else None
        (scales, minima), coarse = self._sizes, self._of_coarse
        if self.table:
            table = self._store_signed(torch.tensor(self.table, dtype=torch.int8).view(torch.uint8))
            to[:, : len(table)], to[:, len(table) : TABLE_BYTES] = table, 0
        to = to[:, self._before :]
        step, every = self._of_block, _COARSE // BLOCK
        places = CodePlaces(self.bits, self.together, step, scales + minima, coarse, every, self._flipped ^ 128)
        if stored is not None and bool(stored.scales.fine) is self.fine:
            found.order(stored, source.inside, places, to)
            found.place_numbers(stored, source.inside, BLOCK // self.group, places, to)
            return
        rows = _rows(source, start, stop)
        found.order(rows, source.inside, places, to)
        if self.fine:
            to = to.view(len(to), source.inside // _COARSE, -1)
            halves = [rows.coarse_scales, rows.coarse_minima][: 1 + self.minima]
            parts = [as_columns(_check_known(numbers)).half().view(torch.uint8) for numbers in halves]
            to[:, :, :coarse] = torch.cat(parts, 2)
            to = to[:, :, coarse:]
        blocks = to.view(*to.shape[:-1], -1, step)
        _fill(blocks[..., :scales], self._scales(rows.scales, rows.coarse_scales, rows.fine_scales))
        if self.zeros:
            _fill(blocks[..., scales : scales + minima], as_columns(_check_known(rows.zeros)))
        elif self.minima:
            least = self._scales(rows.minima, rows.coarse_minima, rows.fine_minima)
            _fill(blocks[..., scales : scales + minima], least)

    @property
    def _of_coarse(self) -> int:
        """Bytes of the coarse scales and minima of 64 columns, which some blocks have in common."""
        return GROUP * 2 * (1 + self.minima) if self.fine else 0

    @property
    def _of_block(self) -> int:
        """Bytes of a block of 64 columns."""
        return sum(self._sizes) + GROUP * BLOCK * self.bits // 8

    def _scales(
        self, whole: torch.Tensor | None, coarse: torch.Tensor | None, fine: torch.Tensor | None
    ) -> torch.Tensor:
        """``[groups, parts of blocks, 64]``: the numbers as they are stored. Raises ``NotHalf``."""
        if self.fine:
            return as_columns(_check_known(fine).to(torch.int8))
        if whole is None:
            whole = (
                _check_known(coarse)[..., None] * _check_known(fine).view(*_check_known(coarse).shape, -1)
            ).flatten(1)
        columns = as_columns(whole)
        if self.floats:
            return columns
        halves = columns.half()
        if not torch.equal(halves.float(), columns):
            raise NotHalf
        return halves

    def _store_signed(self, values: torch.Tensor) -> torch.Tensor:
        """Bytes with a sign as they are stored."""
        return values ^ self._flipped

    @property
    def _flipped(self) -> int:
        """The bits of a byte with a sign that are stored flipped."""
        return 128 if self.together == 4 else 0

    def values(self, group: torch.Tensor, inside: int) -> torch.Tensor:
        """The reverse of ``packed``: float32 ``[64, inside]``."""
        parts, count = BLOCK // self.group, -(-inside // BLOCK)
        kinds, group = 1 + self.minima, group[self._before :]
        coarse = None
        if self.fine:
            groups = group.view(inside // _COARSE, -1)
            coarse = groups[:, : kinds * GROUP * 2].contiguous().view(torch.float16).view(-1, kinds, 1, GROUP).float()
            group = groups[:, kinds * GROUP * 2 :]
        blocks = group.reshape(count, -1)
        first, second = self._sizes
        shape, (of_scales, of_minima) = (count, parts, GROUP), self._dtypes
        scales = blocks[:, :first].contiguous().view(of_scales).view(shape).float()
        minima = (
            blocks[:, first : first + second].contiguous().view(of_minima).view(shape).float() if kinds > 1 else None
        )
        if coarse is not None:
            coarse = coarse.repeat_interleave(_COARSE // BLOCK, 0)
            scales = scales * coarse[:, 0]
            minima = None if minima is None else minima * coarse[:, 1]
        elif self.zeros:
            minima = _check_known(minima) * scales
        codes = self._codes(blocks[:, first + second :])
        values = codes.float() - self.zero if not self.table else torch.tensor(self.table).float()[codes.int()]
        values = values.view(count, parts, self.group, GROUP) * scales[:, :, None]
        if minima is not None:
            values -= minima[:, :, None]
        return values.view(-1, GROUP)[:inside].t()

    def _codes(self, values: torch.Tensor) -> torch.Tensor:
        """int16 ``[blocks, 32, 64]``: what is stored for each element of 64 columns."""
        values, shape = values.contiguous(), (len(values), -1, GROUP, self.together)
        if self.bits == 8:
            tuples = self._store_signed(values).view(torch.int8).view(shape)
        else:
            high = self.bits - 4
            after = 8 // high if high else BLOCK // self.together  # so many tuples, the low bits of two in one
            groups = values.view(len(values), BLOCK // self.together // after, -1, GROUP, self.together)
            low = groups[:, :, -after // 2 :, None]
            tuples = torch.cat([low & 15, low >> 4], 3).view(shape)
            if high:
                rest = groups[:, :, :1]
                each = torch.cat([rest >> number * high for number in range(after)], 2) & (1 << high) - 1
                tuples = tuples | each.view(shape) << 4
        return tuples.transpose(2, 3).reshape(len(values), BLOCK, GROUP).short()


def _stored_bits(source: PackedSource) -> int:
    """Bits that a value takes: 4, 5, 6 or 8."""
    if source.table is not None:
        return 4 if source.bits <= 4 else 8
    return 8 if source.bits > 6 else max(4, source.bits)


def _fill(to: torch.Tensor, numbers: torch.Tensor) -> None:
    """Write ``numbers [groups, parts of blocks, 64]`` to uint8 ``to [groups, ..., blocks, bytes]``."""
    to.copy_(numbers.view(len(to), -1).view(torch.uint8).view(to.shape))


def _rows(source: PackedSource, start: int, stop: int) -> PackedRows:
    """Rows whose codes are what is stored, but for flipped bits, and with scales for 32 elements where more have one.
    Values of a table that take 8 bits are stored themselves, 128 more than they are.
    """
    rows = source.rows(start, stop)
    if source.table is not None and _stored_bits(source) == 8:
        table = torch.tensor([int(value) + 128 for value in source.table], dtype=torch.uint8)
        rows = replace(rows, values=table[rows.codes.int()], layout=ONE_TO_A_BYTE)
    repeat, wanted = source.group // min(source.group, BLOCK), -(-source.inside // BLOCK)
    if repeat == 1:
        return rows
    repeated = {
        name: numbers.repeat_interleave(repeat, 1)[:, :wanted]
        for name in ("scales", "minima", "zeros")
        if (numbers := getattr(rows, name)) is not None
    }
    return replace(rows, **repeated)


def as_columns(numbers: torch.Tensor) -> torch.Tensor:
    """``[rows, n]`` as ``[groups, n, 64]``, padded with zeros."""
    padded = F.pad(numbers, (0, 0, 0, -len(numbers) % GROUP))
    return padded.view(-1, GROUP, numbers.shape[1]).transpose(1, 2).contiguous()


def _is_whole(source: PackedSource) -> bool:
    """Whether a table holds bytes with a sign."""
    return all(value == int(value) and -128 <= value <= 127 for value in source.table or ())


def _check_known(numbers: torch.Tensor | None) -> torch.Tensor:
    if numbers is None:
        raise NotPackable("its scales are not all of one kind")
    return numbers
