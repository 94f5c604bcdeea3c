"""The work lists of the Triton kernel: which keys each of its programs reads.

A tile is a few tokens of one span. The keys of all tiles of a launch are divided into items of about equal length, as
many as the device runs at a time: one long history among short ones occupies the whole device, not one program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cache.pages.layers import AttentionLayer, Reach

LEAST = 2  # blocks of keys, at least, of an item of a divided tile
ITEM, MERGE = 6, 3  # numbers of an item, and of a merge

Array = np.ndarray[Any, Any]


class Place(NamedTuple):
    """The place of one span in a step: its first row, its number of tokens, and the position of the first."""

    row: int
    size: int
    start: int


class WorkList(NamedTuple):
    """What the programs of one launch do.

    ``items [items, 6]``: span, first row and tokens of a tile, first key and end of the keys that are read, and the
    part as which the result is stored, -1 if the item is the whole tile; the longest come first. ``merges [rows, 3]``:
    row, first part and number of parts of each row whose tile was divided. Parts are counted in rows. All int32.
    """

    items: Array
    merges: Array

    def pad(self, items: int, merges: int) -> Array:
        """Both in one array of a fixed size: ``items * 6`` numbers and ``merges * 3``. Empty items have no tokens,
        empty merges the row -1.
        """
        flat = np.zeros(items * ITEM + merges * MERGE, np.int32)
        flat[: self.items.size] = self.items.ravel()
        flat[len(self.items) * ITEM + ITEM - 1 : items * ITEM : ITEM] = -1
        rest = flat[items * ITEM :]
        rest[: self.merges.size] = self.merges.ravel()
        rest[self.merges.size :: MERGE] = -1
        return flat


def tiles(places: Sequence[Place], chosen: Sequence[int], tokens: int, layer: AttentionLayer) -> Array:
    """The spans ``chosen`` in tiles of up to ``tokens``, int64 ``[tiles, 5]``: span, first row, tokens, first key that
    the tile sees, and end of the keys.
    """
    rows, sizes, starts = np.array([places[number] for number in chosen], np.int64).reshape(-1, 3).T
    counts = -(-sizes // tokens)
    span = np.repeat(np.arange(len(counts)), counts)
    at = (np.arange(len(span)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens
    size = np.minimum(tokens, sizes[span] - at)
    first = starts[span] + at
    lowest = _first_keys(layer, first)
    return np.stack([np.array(chosen, np.int64)[span], rows[span] + at, size, lowest, first + size], 1)


def divide(tiles: Array, programs: int, block: int, tokens: int) -> WorkList:
    """The work list of ``tiles`` of up to ``tokens`` each, for about ``programs`` programs that read keys in blocks of
    ``block``. There are at most ``len(tiles) + programs`` items.
    """
    span, row, size, lowest, stop = tiles.T
    blocks = -(-(stop - lowest) // block)
    share = max(-(-int(blocks.sum()) // programs), LEAST)
    splits = -(-blocks // share)
    length = -(-blocks // np.maximum(splits, 1)) * block  # of the items of a tile
    splits = -(-(stop - lowest) // np.maximum(length, block))
    divided = splits > 1
    # A divided tile's parts follow each other, each with a row for every token of a tile.
    first = np.where(divided, np.cumsum(np.where(divided, splits, 0)) - splits, 0) * tokens
    tile = np.repeat(np.arange(len(tiles)), splits)
    nth = np.arange(len(tile)) - np.repeat(np.cumsum(splits) - splits, splits)
    begin = lowest[tile] + nth * length[tile]
    end = np.minimum(begin + length[tile], stop[tile])
    part = np.where(divided[tile], first[tile] + nth * tokens, -1)
    items = np.stack([span[tile], row[tile], size[tile], begin, end, part], 1).astype(np.int32)
    items = items[np.argsort(begin - end, kind="stable")]
    apart = np.flatnonzero(divided)
    token = np.arange(tokens)[None]
    merges = np.stack(
        [
            row[apart][:, None] + token,
            first[apart][:, None] + token,
            np.broadcast_to(splits[apart][:, None], (len(apart), tokens)),
        ],
        2,
    )[np.broadcast_to(token, (len(apart), tokens)) < size[apart][:, None]]
    return WorkList(items, merges.astype(np.int32))


def _first_keys(layer: AttentionLayer, positions: Array) -> Array:
    """``layer.first_key`` of many positions."""
    if layer.window is None:
        return np.zeros_like(positions)
    sliding = layer.reach is Reach.SLIDING
    found: Array = np.maximum(positions - layer.window + 1, 0) if sliding else positions - positions % layer.window
    return found
