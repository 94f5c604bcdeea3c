"""The Triton kernels of products with packed weights, ``multiply``, ``add_parts`` and ``decode``, which
``scheduler.accel.gpu.packed_product`` imports where Triton is installed.

A weight is decoded where it is multiplied, a tile of ``COLUMNS`` of its rows by ``BLOCK`` inputs at a time, in float32.
Two neighbours of 4 bits lie in one byte: a tile of such bytes is two tiles of values, of every second input each.
Inputs of 16 bits are multiplied with the upper and the lower half of a value, so that 16 bits of it count. The order of
the sums does not depend on how many rows there are, or on what is in the others.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def number_of(whole, fine, group, row, rows, GROUP: tl.constexpr, FINE: tl.constexpr, UP: tl.constexpr):
    """A scale or minimum of each row, float32 ``[COLUMNS]``, of a group: ``whole``, or the product of two levels."""
    if FINE == 0:
        found = tl.load(whole + group.to(tl.int64) * rows + row).to(tl.float32)
    else:
        found = tl.load(whole + (group * GROUP // 256).to(tl.int64) * rows + row).to(tl.float32)
        small = tl.load(fine + group.to(tl.int64) * rows + row).to(tl.int32)
        if FINE == 2:  # two numbers of 4 bits in a byte
            small = (small >> UP) & 15
        found = found * small.to(tl.float32)
    return found


@triton.jit
def numbers(
    whole, fine, at, inner, row, rows, GROUP: tl.constexpr, BLOCK: tl.constexpr, FINE: tl.constexpr, UP: tl.constexpr
):
    """Scales or minima for each input of the block from ``at`` on, which has one group or two: ``[COLUMNS, inputs]``,
    or 1 in the place of the inputs.
    """
    first = number_of(whole, fine, at // GROUP, row, rows, GROUP, FINE, UP)[:, None]
    if GROUP < BLOCK:
        second = number_of(whole, fine, at // GROUP + 1, row, rows, GROUP, FINE, UP)[:, None]
        found = tl.where((inner < GROUP)[None, :], first, second)
    else:
        found = first
    return found


@triton.jit
def values(
    eights,
    fours,  # of a block, uint8 [COLUMNS, BLOCK / 2], or what stands for it
    twos,
    ones,
    scales,
    minima,
    zeros,
    fine_scales,
    fine_minima,
    table,
    row,  # [COLUMNS] int64, of the weight
    at,  # the first input of the block
    inside,
    rows,
    PART: tl.constexpr,  # which of the neighbours in a byte
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    ZERO: tl.constexpr,
    BITS: tl.constexpr,
    FINE: tl.constexpr,
    MINIMA: tl.constexpr,
    ZEROS: tl.constexpr,
    TABLE: tl.constexpr,
):
    """float32 ``[COLUMNS, BLOCK / PARTS]``: the values of every ``PARTS``-th input from ``at + PART`` on."""
    inner = tl.arange(0, BLOCK // PARTS) * PARTS + PART
    k = at + inner
    if BITS == 8:
        codes = tl.load(eights + row[:, None] * inside + k[None, :]).to(tl.int32)
    else:
        codes = tl.zeros([row.shape[0], BLOCK // PARTS], tl.int32)
        if BITS & 4:
            codes = (fours.to(tl.int32) >> (4 * PART)) & 15
        if BITS & 2:
            pair = tl.load(twos + row[:, None] * (inside // 4) + (k // 4)[None, :]).to(tl.int32)
            codes = codes | (((pair >> (k % 4 * 2)[None, :]) & 3) << (BITS & 4))
        if BITS & 1:
            bit = tl.load(ones + row[:, None] * (inside // 8) + (k // 8)[None, :]).to(tl.int32)
            codes = codes | (((bit >> (k % 8)[None, :]) & 1) << (BITS & 6))
    found = tl.load(table + codes) if TABLE else (codes - ZERO).to(tl.float32)
    scale = numbers(scales, fine_scales, at, inner, row, rows, GROUP, BLOCK, FINE, 0)
    if ZEROS:
        found = found - numbers(zeros, zeros, at, inner, row, rows, GROUP, BLOCK, 0, 0)
    found = found * scale
    if MINIMA:
        found = found - numbers(minima, fine_minima, at, inner, row, rows, GROUP, BLOCK, FINE, 4)
    return found


@triton.jit(do_not_specialize=["count", "share", "blocks"])
def multiply(
    x,  # [rows of x, inside]
    out,  # [count, columns], or of parts [splits, count, columns] float32
    owners,  # of experts: [tiles, ROWS] int32, which row of ``out`` each is; -1: none
    experts,  # of experts: [tiles] int32; -1: the tile has no rows
    eights,  # codes of 8 bits, uint8 [rows, inside]; else a plane for 4, 2 and 1 of their bits, the lowest in the first
    fours,  # [rows, inside / 2]
    twos,  # [rows, inside / 4]
    ones,  # [rows, inside / 8]
    scales,  # [groups, rows], or coarse ones [inside / 256, rows]
    minima,  # also
    zeros,  # [groups, rows] int8
    fine_scales,  # [groups, rows] int8, or uint8 with those of minima in the upper half
    fine_minima,  # also
    table,  # float32
    count,
    columns,  # rows of the weight, or of one expert
    rows,  # of the weight
    inside,
    share,  # rows of ``out`` that read the same row of x
    blocks,  # that a program goes through
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    BITS: tl.constexpr,
    FINE: tl.constexpr,  # 0: one level of scales; 1: two; 2: two, whose fine ones lie in one byte
    MINIMA: tl.constexpr,
    ZEROS: tl.constexpr,
    TABLE: tl.constexpr,
    ROUTED: tl.constexpr,
):
    tile, split = tl.program_id(1), tl.program_id(2)
    lane = tl.arange(0, ROWS)
    if ROUTED:
        owner = tl.load(owners + tile * ROWS + lane)
        expert = tl.load(experts + tile)
        real = owner >= 0
    else:
        owner = tile * ROWS + lane
        expert = 0
        real = owner < count
    if expert >= 0:
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        there = column < columns
        row = expert.to(tl.int64) * columns + tl.where(there, column, 0) if ROUTED else tl.where(there, column, 0)
        row = row.to(tl.int64)
        given = x + (tl.where(real, owner, 0) // share).to(tl.int64) * inside
        PARTS: tl.constexpr = 2 if BITS != 8 and BITS & 4 else 1
        inner = tl.arange(0, BLOCK // PARTS)
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        begin = split * blocks
        for block in range(begin, tl.minimum(begin + blocks, inside // BLOCK)):
            at = block * BLOCK
            packed = inner  # stands for what there is not
            if PARTS == 2:
                packed = tl.load(fours + row[:, None] * (inside // 2) + (at // 2 + inner)[None, :])
            for part in tl.static_range(PARTS):
                weight = values(
                    eights, packed, twos, ones, scales, minima, zeros, fine_scales, fine_minima, table,
                    row, at, inside, rows, part, PARTS, GROUP, BLOCK, ZERO, BITS, FINE, MINIMA, ZEROS, TABLE,
                )  # fmt: skip
                weight = tl.trans(weight)
                k = at + inner * PARTS + part
                some = tl.load(given[:, None] + k[None, :], mask=real[:, None], other=0.0)
                if some.dtype == tl.float32:
                    sums = tl.dot(some, weight, sums, input_precision="ieee")
                else:
                    upper = weight.to(some.dtype)
                    lower = (weight - upper.to(tl.float32)).to(some.dtype)
                    sums = tl.dot(some, lower, tl.dot(some, upper, sums))
        place = (split.to(tl.int64) * count + owner) * columns
        tl.store(
            out + place[:, None] + column[None, :],
            sums.to(out.dtype.element_ty),
            mask=real[:, None] & there[None, :],
        )


@triton.jit(do_not_specialize=["size", "splits"])
def add_parts(parts, out, size, splits, BLOCK: tl.constexpr):
    """``parts [splits, size]`` float32, added one after the other: ``out [size]``."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < size
    from_here = parts + at
    total = tl.load(from_here, mask=there, other=0.0)
    for _ in range(1, splits):
        from_here += size
        total += tl.load(from_here, mask=there, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["first", "stop"])
def decode(
    out,  # [stop - first, inside]
    eights, fours, twos, ones, scales, minima, zeros, fine_scales, fine_minima, table,  # as in ``multiply``
    first,  # row of the weight
    stop,
    rows,
    inside,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    BITS: tl.constexpr,
    FINE: tl.constexpr,
    MINIMA: tl.constexpr,
    ZEROS: tl.constexpr,
    TABLE: tl.constexpr,
):  # fmt: skip
    """Rows of a weight as floats."""
    row = first + (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    there = row < stop
    row, place = tl.where(there, row, first), (row - first) * inside
    at = tl.program_id(1) * BLOCK
    PARTS: tl.constexpr = 2 if BITS != 8 and BITS & 4 else 1
    inner = tl.arange(0, BLOCK // PARTS)
    packed = inner
    if PARTS == 2:
        packed = tl.load(fours + row[:, None] * (inside // 2) + (at // 2 + inner)[None, :])
    for part in tl.static_range(PARTS):
        weight = values(
            eights, packed, twos, ones, scales, minima, zeros, fine_scales, fine_minima, table,
            row, at, inside, rows, part, PARTS, GROUP, BLOCK, ZERO, BITS, FINE, MINIMA, ZEROS, TABLE,
        )  # fmt: skip
        k = at + inner * PARTS + part
        tl.store(out + place[:, None] + k[None, :], weight.to(out.dtype.element_ty), mask=there[:, None])
