"""The Triton kernel ``min_probabilities``, which ``scheduler.accel.gpu.truncation_kernel`` imports where Triton is
installed.

Probabilities are not negative, so they are ordered as the integers that their bits are. A program finds the threshold
of one row two bits at a time: each pass over the row counts the tokens, or adds up the probabilities, from each of
three candidates on. Nothing is sorted, and a row's result depends on that row alone.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def raised(
    least,  # the bits of a value, of which the lower 30 are searched
    needed,  # int32, or float64 of probabilities
    begin,  # of the row, [width] float32
    width,
    COUNTED: tl.constexpr,  # tokens are counted; else their probabilities are added up
    BLOCK: tl.constexpr,
):
    """The bits of the largest value from which on the tokens of the row are as many, or as probable, as ``needed``."""
    KIND: tl.constexpr = tl.int32 if COUNTED else tl.float64
    offsets = tl.arange(0, BLOCK)
    for step in range(15):
        unit = 1 << (28 - 2 * step)
        one = tl.zeros([BLOCK], KIND)
        two = tl.zeros([BLOCK], KIND)
        three = tl.zeros([BLOCK], KIND)
        for first in range(0, width, BLOCK):
            values = tl.load(begin + first + offsets, first + offsets < width, other=0.0)
            above = values.to(tl.int32, bitcast=True) - least
            weights = tl.full([BLOCK], 1, tl.int32) if COUNTED else values.to(tl.float64)
            one += tl.where(above >= unit, weights, tl.zeros([BLOCK], KIND))
            two += tl.where(above >= 2 * unit, weights, tl.zeros([BLOCK], KIND))
            three += tl.where(above >= 3 * unit, weights, tl.zeros([BLOCK], KIND))
        passed = (tl.sum(one, 0) >= needed).to(tl.int32) + (tl.sum(two, 0) >= needed).to(tl.int32)
        least += unit * (passed + (tl.sum(three, 0) >= needed).to(tl.int32))
    return least


@triton.jit(do_not_specialize=["width", "stride"])
def min_probabilities(
    probs,  # [rows, width] float32, none above 1
    out,  # [rows] float32
    top_k,  # [rows] int64: at most width
    share,  # [rows] float64: of the sum of the ``top_k`` largest; above 1: all of them
    min_p,  # [rows] float32
    width,
    stride,
    BLOCK: tl.constexpr,  # tokens that are looked at together
):
    row = tl.program_id(0).to(tl.int64)
    begin, offsets = probs + row * stride, tl.arange(0, BLOCK)
    count, wanted = tl.load(top_k + row), tl.load(share + row)

    largest = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK], tl.float64)
    for first in range(0, width, BLOCK):
        values = tl.load(begin + first + offsets, first + offsets < width, other=0.0)
        largest = tl.maximum(largest, values)
        sums += values.to(tl.float64)
    total = tl.sum(sums, 0)

    least = 0  # the bits of the smallest of the ``top_k`` largest
    if count < width:
        least = raised(least, count, begin, width, True, BLOCK)
        larger = tl.zeros([BLOCK], tl.int32)  # of equals only as many are kept as there is room for
        sums = tl.zeros([BLOCK], tl.float64)
        for first in range(0, width, BLOCK):
            values = tl.load(begin + first + offsets, first + offsets < width, other=0.0)
            above = values.to(tl.int32, bitcast=True) > least
            larger += above.to(tl.int32)
            sums += tl.where(above, values, 0.0).to(tl.float64)
        smallest = least.to(tl.float32, bitcast=True).to(tl.float64)
        total = tl.sum(sums, 0) + smallest * (count - tl.sum(larger, 0)).to(tl.float64)

    if wanted < 1.0 and total > 0.0:  # the largest value from which on the sum is enough
        least = raised(least, wanted * total, begin, width, False, BLOCK)

    threshold = least.to(tl.float32, bitcast=True)
    tl.store(out + row, tl.maximum(threshold, tl.load(min_p + row) * tl.max(largest, 0)))
