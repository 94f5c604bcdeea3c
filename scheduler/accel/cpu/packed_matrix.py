"""``PackedMatrix``: a weight of few bits, as the C++ kernel multiplies with it, made from a `PackedSource`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from cache.memory import huge
from scheduler.accel.cpu.matrix import GROUP, PACKED, Matrix
from scheduler.accel.cpu.program_kernel import kernel
from scheduler.weights.packed_source import PackedRows, PackedSource
from scheduler.weights.packed_values import in_order

_NIBBLES, _FLOATS, _FINE, _MINIMA, _SHORT, _ZEROS = 1, 2, 4, 8, 32, 64  # of a type beside PACKED, see kernels/packed.h
_BLOCK = 32  # elements of a row that lie together
_COARSE = 256  # elements of a row that have a coarse scale in common


class NotPackable(ValueError):
    """A packed weight has no form that the kernel reads."""


class _NotHalf(Exception):
    """A scale or a minimum is no number of float16."""


class PackedMatrix(Matrix):
    """A weight ``[out, inside]`` of 4, 5, 6 or 8 bits a value, with scales of two levels, in float16 or float32; or the
    weights of experts, each of them padded with rows of zeros to whole groups of columns.
    """

    def __init__(self, source: PackedSource, experts: int = 1) -> None:
        """Copies a packed weight, 64 rows at a time. Raises ``NotPackable``."""
        each = source.out // experts
        groups = -(-each // GROUP)
        self.out, self.inside, self.limit = each if experts == 1 else experts * groups * GROUP, source.inside, None
        self._experts, self._groups, self._each = experts, groups, each
        try:
            self._copy(source, _Form.of(source))
        except _NotHalf:
            self._copy(source, replace(_Form.of(source), floats=True))

    def _copy(self, source: PackedSource, form: _Form) -> None:
        size = form.nbytes(self.inside)
        data = huge.empty(self._experts * self._groups * size, torch.uint8)
        for number, to in enumerate(data.view(-1, size)):
            start = number // self._groups * self._each + number % self._groups * GROUP
            stop = min(start + GROUP, (number // self._groups + 1) * self._each)
            to.copy_(form.packed(_rows(source, start, stop)))
        self.data, self._form, self.kind = data, form, form.type
        self.order = None if source.order is None else source.order.numpy()

    def dense(self) -> torch.Tensor:
        """The values: float32 ``[out, inside]``."""
        return self.dequantise(0, self.out)

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of int64 ``ids [n]``: float32 ``[n, inside]``."""
        return torch.cat([self.dequantise(row, row + 1) for row in ids.tolist()])

    def dequantise(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop``: float32 ``[rows, inside]``."""
        groups = self.data.view(-1, self._form.nbytes(self.inside))
        first, last = start // GROUP, -(-stop // GROUP)
        plain = torch.empty((last - first) * GROUP, self.inside)
        for number in range(first, last):
            at = (number - first) * GROUP
            plain[at : at + GROUP] = self._form.values(groups[number], self.inside)
        found = plain[start - first * GROUP : stop - first * GROUP]
        return in_order(found, None if self.order is None else torch.from_numpy(self.order))


@dataclass(frozen=True)
class _Form:
    """How 64 columns lie in memory, block after block of 32 elements of each."""

    bits: int  # 4, 5, 6 or 8
    group: int  # 16 or 32 elements with one scale
    floats: bool  # scales in float32, else in float16
    fine: bool  # scales of two levels
    minima: bool
    zeros: bool  # minima are whole numbers of scales
    zero: int  # that is subtracted from what is stored, -128 to 127
    together: int  # elements of a column that lie so: 2, or 4, and then bytes are stored without a sign

    @classmethod
    def of(cls, source: PackedSource) -> _Form:
        """The form of a weight. Raises ``NotPackable``."""
        group = min(source.group, _BLOCK)
        if group not in (16, _BLOCK) or source.group % group:
            raise NotPackable(f"{source.group} elements have a scale in common")
        table = source.table is not None
        if table and not _is_whole(source):
            raise NotPackable("its values are no whole numbers")
        bits = _stored_bits(source)
        zero = 0 if table else source.zero - (128 if bits == 8 else 0)
        if not -128 <= zero <= 127:
            raise NotPackable(f"its zero is {source.zero}")
        sample = source.rows(0, min(GROUP, source.out))
        fine = sample.fine_scales is not None and source.inside % _COARSE == 0 and source.group == group
        zeros = sample.zeros is not None
        minima = zeros or sample.minima is not None or sample.fine_minima is not None
        found = kernel()
        return cls(bits, group, False, fine, minima, zeros, zero, 2 if found is None else found.together)

    @property
    def type(self) -> int:
        """The number by which the kernel knows it."""
        flags = PACKED if self.bits == 8 else PACKED | _NIBBLES | self.bits - 4 << 16
        flags |= self.floats * _FLOATS | self.fine * _FINE
        flags |= self.minima * _MINIMA | self.zeros * _ZEROS | (self.group == 16) * _SHORT
        return flags | (self.zero & 255) << 8

    def nbytes(self, inside: int) -> int:
        """Bytes of 64 columns."""
        coarse = inside // _COARSE * GROUP * 2 * (1 + self.minima) if self.fine else 0
        return coarse + -(-inside // _BLOCK) * (sum(self._sizes) + GROUP * _BLOCK * self.bits // 8)

    @property
    def _dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Of scales and of minima."""
        scales = torch.int8 if self.fine else torch.float32 if self.floats else torch.float16
        return scales, torch.int8 if self.zeros else scales

    @property
    def _sizes(self) -> tuple[int, int]:
        """Bytes of the scales and of the minima of a block of 64 columns."""
        count, (scales, minima) = GROUP * (_BLOCK // self.group), self._dtypes
        return count * scales.itemsize, count * minima.itemsize * self.minima

    def packed(self, rows: PackedRows) -> torch.Tensor:
        """uint8 ``[nbytes]`` of 64 rows or, the last time, fewer."""
        parts = [self._scales(rows.scales, rows.coarse_scales, rows.fine_scales)]
        if self.zeros:
            parts.append(self._numbers(_as_columns(_known(rows.zeros))))
        elif self.minima:
            parts.append(self._scales(rows.minima, rows.coarse_minima, rows.fine_minima))
        blocks = torch.cat([*parts, self._values(rows.values)], 1)
        if not self.fine:
            return blocks.flatten()
        coarse = [_as_columns(_known(rows.coarse_scales)).half()]
        if self.minima:
            coarse.append(_as_columns(_known(rows.coarse_minima)).half())
        before = torch.cat([part.view(torch.uint8) for part in coarse], 1)
        return torch.cat([before, blocks.view(len(before), -1)], 1).flatten()

    def _scales(
        self, whole: torch.Tensor | None, coarse: torch.Tensor | None, fine: torch.Tensor | None
    ) -> torch.Tensor:
        """uint8 ``[blocks, bytes]``: for each part of a block a number for each of 64 columns."""
        if self.fine:
            columns = _as_columns(_known(fine).to(torch.int8))
        else:
            if whole is None:
                whole = (_known(coarse)[..., None] * _known(fine).view(*_known(coarse).shape, -1)).flatten(1)
            columns = _as_columns(whole)
            if not self.floats:
                halves = columns.half()
                if not torch.equal(halves.float(), columns):
                    raise _NotHalf
                columns = halves
        return self._numbers(columns)

    def _numbers(self, columns: torch.Tensor) -> torch.Tensor:
        """uint8 ``[blocks, bytes]`` of numbers ``[parts of blocks, 64]``."""
        return columns.view(-1, _BLOCK // self.group * GROUP).view(torch.uint8)

    def _values(self, values: torch.Tensor) -> torch.Tensor:
        """uint8 ``[blocks, bytes]`` of codes ``[rows, inside]``."""
        padded = values
        if values.shape[1] % _BLOCK or len(values) < GROUP:
            padded = F.pad(values, (0, -values.shape[1] % _BLOCK, 0, GROUP - len(values)))
        wide = {2: torch.int16, 4: torch.int32}[self.together]
        tuples = padded.contiguous().view(wide).t().contiguous().view(torch.uint8)  # [inside / together, together * 64]
        if self.bits == 8:
            tuples = tuples ^ 128 if self.together == 4 else tuples
            return tuples.view(padded.shape[1] // _BLOCK, -1)
        both = (tuples & 15).view(-1, 2, self.together * GROUP)
        parts = [(both[:, 0] | both[:, 1] << 4).view(padded.shape[1] // _BLOCK, -1)]
        if high := self.bits - 4:
            rest = (tuples >> 4).view(-1, 8 // high, self.together * GROUP)
            joined = rest[:, 0].clone()
            for number in range(1, 8 // high):
                joined |= rest[:, number] << number * high
            parts.append(joined.view(padded.shape[1] // _BLOCK, -1))
        return torch.cat(parts, 1)

    def values(self, group: torch.Tensor, inside: int) -> torch.Tensor:
        """The reverse of ``packed``: float32 ``[64, inside]``."""
        parts, count = _BLOCK // self.group, -(-inside // _BLOCK)
        kinds = 1 + self.minima
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
            coarse = coarse.repeat_interleave(_COARSE // _BLOCK, 0)
            scales = scales * coarse[:, 0]
            minima = None if minima is None else minima * coarse[:, 1]
        elif self.zeros:
            minima = _known(minima) * scales
        values = self._codes(blocks[:, first + second :]).float() - self.zero
        values = values.view(count, parts, self.group, GROUP) * scales[:, :, None]
        if minima is not None:
            values -= minima[:, :, None]
        return values.view(-1, GROUP)[:inside].t()

    def _codes(self, values: torch.Tensor) -> torch.Tensor:
        """int16 ``[blocks, 32, 64]``: what is stored for each element of 64 columns."""
        values, shape = values.contiguous(), (len(values), -1, GROUP, self.together)
        if self.bits == 8:
            tuples = (values ^ 128 if self.together == 4 else values).view(torch.int8).view(shape)
        else:
            low = values[:, : GROUP * _BLOCK // 2].view(len(values), -1, 1, GROUP, self.together)
            tuples = torch.cat([low & 15, low >> 4], 2).view(shape)
            if high := self.bits - 4:
                rest = values[:, GROUP * _BLOCK // 2 :].view(len(values), -1, 1, GROUP, self.together)
                each = torch.cat([rest >> number * high for number in range(8 // high)], 2) & (1 << high) - 1
                tuples = tuples | each.view(tuples.shape) << 4
        return tuples.transpose(2, 3).reshape(len(values), _BLOCK, GROUP).short()


def _stored_bits(source: PackedSource) -> int:
    """Bits that a value takes: 4, 5, 6 or 8."""
    return 8 if source.table is not None or source.bits > 6 else max(4, source.bits)


def _rows(source: PackedSource, start: int, stop: int) -> PackedRows:
    """Rows whose codes are what is stored: bytes with a sign, and scales for 32 elements where more have one."""
    rows = source.rows(start, stop)
    values = rows.values
    if source.table is not None:
        table = torch.tensor([int(value) for value in source.table], dtype=torch.int8)
        values = table[values.int()].view(torch.uint8)
    elif _stored_bits(source) == 8:
        values = values ^ 128  # as bytes with a sign: 128 less
    rows = replace(rows, values=values)
    repeat, wanted = source.group // min(source.group, _BLOCK), -(-source.inside // _BLOCK)
    if repeat == 1:
        return rows
    repeated = {
        name: numbers.repeat_interleave(repeat, 1)[:, :wanted]
        for name in ("scales", "minima", "zeros")
        if (numbers := getattr(rows, name)) is not None
    }
    return replace(rows, **repeated)


def _as_columns(numbers: torch.Tensor) -> torch.Tensor:
    """``[rows, n]`` as ``[n, 64]``, padded with zeros."""
    return F.pad(numbers, (0, 0, 0, GROUP - len(numbers))).t().contiguous()


def _is_whole(source: PackedSource) -> bool:
    """Whether a table holds bytes with a sign."""
    return all(value == int(value) and -128 <= value <= 127 for value in source.table or ())


def _known(numbers: torch.Tensor | None) -> torch.Tensor:
    if numbers is None:
        raise NotPackable("its scales are not all of one kind")
    return numbers
