"""The Triton kernels of attention over pages, ``attend`` and ``merge``. ``cache.attention.triton`` imports this module
where Triton is installed.

A tile is a few tokens of one span with all query heads that share a key head, or with some of them, ``ROWS`` queries
at most. A program reads some keys of one tile, as a work list says (``cache.attention.work_list``), from their pages by
the span's page table. Where a tile's keys are divided among programs ``merge`` puts their parts together. Of rows of
latents (``REST``) a block is read once, as values and as the first part of keys.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def wide(numbers, dtype: tl.constexpr, CODEC: tl.constexpr):
    """Numbers of pages as ``dtype``; all that one byte can say is exact in it. No instruction for fp8 is needed, which
    GPUs before 8.9 lack.
    """
    if CODEC == 2:  # four bits of exponent, three of mantissa: a float16 with another bias
        bits = numbers.to(tl.uint16)
        half = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
        return (half.to(tl.float16, bitcast=True) * 256.0).to(dtype)
    return numbers.to(dtype)


# ``positions`` is a row of a step's numbers: where it begins depends on how many tokens there are.
@triton.jit(
    do_not_specialize=["flagged", "table_stride", "window", "heads", "key_heads"],
    do_not_specialize_on_alignment=["positions", "items"],
)
def attend(
    query,  # [tokens, heads, DIM + REST]
    key,  # [slots, PAGE, key heads, DIM + REST]; of records int8, or the bits of fp8 as uint8
    value,  # [slots, PAGE, key heads, VALUE]; also. Not read with ``REST``
    key_scales,  # of records, [slots, PAGE, key heads] float32
    value_scales,  # also
    out,  # [tokens, heads, VALUE]
    parts,  # [rows of parts, heads, PADDED_VALUE] float32
    stats,  # [rows of parts, heads, 2] float32: largest score, sum of weights
    sinks,  # [heads] float32
    tables,  # [spans, pages] int32: the slots of a span's pages
    items,  # [items, 6] int32: see ``WorkList``
    positions,  # [tokens] int64
    flags,  # [spans, flagged] uint8: 0 where a token is hidden; those behind are not
    flagged,
    table_stride,
    query_token,
    query_head,
    key_slot,
    key_token,
    key_head,
    value_slot,
    value_token,
    value_head,
    key_scales_slot,
    key_scales_token,
    value_scales_slot,
    value_scales_token,
    scale,
    softcap,
    window,  # keys that a query sees at most, or of a chunk
    heads,
    key_heads,  # or tiles of heads, if one key head is all that there is
    GROUP: tl.constexpr,  # query heads that share a key head, or of a tile
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,  # keys that are looked at together
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE: tl.constexpr,
    REST: tl.constexpr,  # numbers of a key behind the DIM = VALUE that are its value too; 0: keys and values are apart
    PADDED: tl.constexpr,  # DIM, up to a power of two
    PADDED_REST: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    CHUNKED: tl.constexpr,  # only keys of the same chunk are seen
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    FLAGS: tl.constexpr,
    CODEC: tl.constexpr,  # 0: keys and values as they are; 1: int8, 2: fp8 in records
):
    item, shared = items + 6 * (tl.program_id(0) // key_heads), tl.program_id(0) % key_heads
    span, row, tokens = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    begin, end, part = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    start = tl.load(positions + row).to(tl.int32)  # of the tile's first token
    lane = tl.arange(0, ROWS)
    token, head = lane // GROUP, shared * GROUP + lane % GROUP
    real = token < tokens
    if REST:
        real = real & (head < heads)  # the last tile may have fewer
    position = start + token
    earliest = position - position % window if CHUNKED else position - window + 1

    across = tl.arange(0, PADDED)
    place = (row + token).to(tl.int64) * query_token + head * query_head
    q = tl.load(query + place[:, None] + across[None, :], mask=real[:, None] & (across < DIM)[None, :], other=0.0)
    if REST:
        behind = tl.arange(0, PADDED_REST)
        q_rest = query + place[:, None] + DIM + behind[None, :]
        q_rest = tl.load(q_rest, mask=real[:, None] & (behind < REST)[None, :], other=0.0)
    across_value = tl.arange(0, PADDED_VALUE)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED_VALUE], tl.float32)
    for at in range(begin, end, KEYS):
        position_of_key = at + tl.arange(0, KEYS)
        there = position_of_key < end
        page = tl.load(tables + span.to(tl.int64) * table_stride + position_of_key // PAGE, mask=there, other=0)
        offset = position_of_key % PAGE
        where = page.to(tl.int64) * key_slot + offset * key_token + shared * key_head
        if REST:  # read once, as values
            v = key + where[:, None] + across[None, :]
            v = tl.load(v, mask=there[:, None] & (across < DIM)[None, :], other=0.0)
            k = tl.trans(v)
        else:
            k = key + where[None, :] + across[:, None]
            k = tl.load(k, mask=there[None, :] & (across < DIM)[:, None], other=0.0)
        scores = tl.dot(q, wide(k, q.dtype, CODEC), input_precision="ieee")
        if REST:
            k_rest = key + where[:, None] + DIM + behind[None, :]
            k_rest = tl.load(k_rest, mask=there[:, None] & (behind < REST)[None, :], other=0.0)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        scores = scores * scale
        if CODEC != 0:
            which = page.to(tl.int64) * key_scales_slot + offset * key_scales_token + shared
            scores = scores * tl.load(key_scales + which, mask=there, other=0.0)[None, :]
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # tanh
        seen = there[None, :] & (position_of_key[None, :] <= position[:, None])
        seen = seen & (position_of_key[None, :] >= earliest[:, None])
        if FLAGS:
            which = span.to(tl.int64) * flagged + position_of_key
            shown = tl.load(flags + which, mask=there & (position_of_key < flagged), other=1)
            seen = seen & (shown != 0)[None, :]
        scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))  # in powers of two
        higher = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(most - base)
        if REST == 0:
            where = page.to(tl.int64) * value_slot + offset * value_token + shared * value_head
            v = tl.load(
                value + where[:, None] + across_value[None, :],
                mask=there[:, None] & (across_value < VALUE)[None, :],
                other=0.0,
            )
        if CODEC != 0:
            which = page.to(tl.int64) * value_scales_slot + offset * value_scales_token + shared
            by = tl.load(value_scales + which, mask=there, other=0.0)
            v = (wide(v, tl.float32, CODEC) * by[:, None]).to(q.dtype)
        total = total * kept + tl.sum(weights, 1)
        sums = sums * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        most = higher

    if part >= 0:
        place = (part + token).to(tl.int64) * heads + head
        tl.store(stats + place * 2, most, mask=real)
        tl.store(stats + place * 2 + 1, total, mask=real)
        tl.store(parts + place[:, None] * PADDED_VALUE + across_value[None, :], sums, mask=real[:, None])
    else:
        if SINKS:
            base = tl.where(most == float("-inf"), 0.0, most)
            total += tl.exp2(tl.load(sinks + head, mask=real, other=0.0) * 1.4426950408889634 - base)
        sums = sums / tl.where(total > 0, total, 1.0)[:, None]
        cell = (row + token).to(tl.int64) * heads + head
        tl.store(
            out + cell[:, None] * VALUE + across_value[None, :],
            sums.to(out.dtype.element_ty),
            mask=real[:, None] & (across_value < VALUE)[None, :],
        )


@triton.jit(do_not_specialize=["apart", "heads"], do_not_specialize_on_alignment=["merges"])
def merge(
    parts,  # [rows of parts, heads, PADDED_VALUE] float32
    stats,  # [rows of parts, heads, 2] float32
    out,  # [tokens, heads, VALUE]
    sinks,  # [heads] float32
    merges,  # [rows, 3] int32: see ``WorkList``; row -1: none
    apart,  # rows between two parts of a row
    heads,
    VALUE: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    PARTS: tl.constexpr,  # parts that are looked at together
    SINKS: tl.constexpr,
):
    place, head = merges + 3 * tl.program_id(0), tl.program_id(1)
    row, first, count = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    across = tl.arange(0, PADDED_VALUE)
    most, whole = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    sums = tl.zeros([PADDED_VALUE], tl.float32)
    for at in range(0, count, PARTS):
        number = at + tl.arange(0, PARTS)
        there = number < count
        part = (first + number * apart).to(tl.int64) * heads + head
        largest = tl.load(stats + part * 2, mask=there, other=float("-inf"))
        total = tl.load(stats + part * 2 + 1, mask=there, other=0.0)
        higher = tl.maximum(most, tl.max(largest, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight, kept = tl.exp2(largest - base), tl.exp2(most - base)
        found = tl.load(parts + part[:, None] * PADDED_VALUE + across[None, :], mask=there[:, None], other=0.0)
        sums = sums * kept + tl.sum(found * weight[:, None], 0)
        whole = whole * kept + tl.sum(weight * total, 0)
        most = higher
    if SINKS:
        base = tl.where(most == float("-inf"), 0.0, most)
        whole += tl.exp2(tl.load(sinks + head) * 1.4426950408889634 - base)
    sums = sums / tl.where(whole > 0, whole, 1.0)
    cell = row.to(tl.int64) * heads + head
    tl.store(out + cell * VALUE + across, sums.to(out.dtype.element_ty), mask=(across < VALUE) & (row >= 0))
