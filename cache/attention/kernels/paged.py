"""The Triton kernels of attention over pages, ``attend`` and ``merge``. ``cache.attention.triton`` imports this module
where Triton is installed.

A tile is a few tokens of one span with all query heads that share a key head, ``ROWS`` queries at most. Keys are read
from their pages by the span's page table. The keys of a tile are shared out among ``splits`` programs where there are
too few tiles to fill the device; ``merge`` then puts their parts together.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


# ``positions`` is a row of a step's numbers: where it begins depends on how many tokens there are.
@triton.jit(
    do_not_specialize=["flagged", "table_stride", "window", "heads", "splits"],
    do_not_specialize_on_alignment=["positions"],
)
def attend(
    query,  # [tokens, heads, DIM]
    key,  # [slots, PAGE, key heads, DIM]
    value,  # [slots, PAGE, key heads, VALUE]
    out,  # [tokens, heads, VALUE]; in parts [tiles * (ROWS // GROUP), heads, splits, PADDED_VALUE] float32
    stats,  # in parts [tiles * (ROWS // GROUP), heads, splits, 2] float32: largest score, sum of weights
    sinks,  # [heads] float32
    tables,  # [spans, pages] int32: the slots of a span's pages
    tiles,  # [tiles, 3] int32: span, first row, tokens
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
    scale,
    softcap,
    window,  # keys that a query sees at most, or of a chunk
    heads,
    splits,
    GROUP: tl.constexpr,  # query heads that share a key head
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,  # keys that are looked at together
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE: tl.constexpr,
    PADDED: tl.constexpr,  # DIM, up to a power of two
    PADDED_VALUE: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNKED: tl.constexpr,  # only keys of the same chunk are seen
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    FLAGS: tl.constexpr,
):
    tile, shared, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    span, row, tokens = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    start = tl.load(positions + row).to(tl.int32)  # of the tile's first token
    lane = tl.arange(0, ROWS)
    token, head = lane // GROUP, shared * GROUP + lane % GROUP
    real = token < tokens
    position = start + token
    if CHUNKED:
        earliest, lowest = position - position % window, start - start % window
    else:
        earliest, lowest = position - window + 1, tl.maximum(start - window + 1, 0)
    share = tl.cdiv(tl.cdiv(start + tokens - lowest, splits), KEYS) * KEYS
    begin = lowest + split * share
    end = tl.minimum(begin + share, start + tokens)

    across = tl.arange(0, PADDED)
    place = (row + token).to(tl.int64) * query_token + head * query_head
    q = tl.load(query + place[:, None] + across[None, :], mask=real[:, None] & (across < DIM)[None, :], other=0.0)
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
        k = tl.load(key + where[None, :] + across[:, None], mask=there[None, :] & (across < DIM)[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
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
        where = page.to(tl.int64) * value_slot + offset * value_token + shared * value_head
        v = tl.load(
            value + where[:, None] + across_value[None, :],
            mask=there[:, None] & (across_value < VALUE)[None, :],
            other=0.0,
        )
        total = total * kept + tl.sum(weights, 1)
        sums = sums * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        most = higher

    if PARTS:
        part = ((tile * (ROWS // GROUP) + token).to(tl.int64) * heads + head) * splits + split
        tl.store(stats + part * 2, most, mask=real)
        tl.store(stats + part * 2 + 1, total, mask=real)
        tl.store(out + part[:, None] * PADDED_VALUE + across_value[None, :], sums, mask=real[:, None])
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


@triton.jit
def merge(
    parts,  # [places, heads, SPLITS, PADDED_VALUE] float32
    stats,  # [places, heads, SPLITS, 2] float32
    out,  # [tokens, heads, VALUE]
    sinks,  # [heads] float32
    rows,  # [places] int32: the token that was computed there; -1: none
    heads,
    VALUE: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
):
    row, head = tl.load(rows + tl.program_id(0)), tl.program_id(1)
    split, across = tl.arange(0, SPLITS), tl.arange(0, PADDED_VALUE)
    part = (tl.program_id(0).to(tl.int64) * heads + head) * SPLITS + split
    real = (split >= 0) & (row >= 0)  # places that were not written are not read
    most = tl.load(stats + part * 2, mask=real, other=float("-inf"))
    total = tl.load(stats + part * 2 + 1, mask=real, other=0.0)
    higher = tl.max(most, 0)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp2(most - base)
    whole = tl.sum(weight * total, 0)
    if SINKS:
        whole += tl.exp2(tl.load(sinks + head) * 1.4426950408889634 - base)
    sums = tl.load(parts + part[:, None] * PADDED_VALUE + across[None, :], mask=real[:, None], other=0.0)
    sums = tl.sum(sums * weight[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    cell = row.to(tl.int64) * heads + head
    tl.store(out + cell * VALUE + across, sums.to(out.dtype.element_ty), mask=(across < VALUE) & (row >= 0))
