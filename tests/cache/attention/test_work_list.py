"""Work lists cover each key of each tile once, fill a device, and do not wait for one long history."""

from __future__ import annotations

import heapq
import random

import pytest

from cache.attention.self_test import LAYERS
from cache.attention.work_list import Place, WorkList, divide, tiles
from cache.pages.layers import AttentionLayer, Reach

FULL = AttentionLayer(Reach.FULL, None, True)
PROCESSORS, KEY_HEADS, BLOCK = 132, 8, 64  # of an H100 and of Llama-3.1-8B


def places_of(work: list[tuple[int, int]]) -> list[Place]:
    """Spans with so many tokens cached and new."""
    found, row = [], 0
    for start, size in work:
        found.append(Place(row, size, start))
        row += size
    return found


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("programs", [1, 5, 33, 264])
@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_every_key_that_a_tile_sees_is_read_once(layer: AttentionLayer, programs: int, tokens: int) -> None:
    rng = random.Random(programs)
    for company in (1, 2, 40):
        work = [(rng.choice([0, 3, 900, 5000]), rng.randrange(1, 1 + (tokens > 1) * 90 + 1)) for _ in range(company)]
        places = places_of(work)
        cut = tiles(places, range(company), tokens, layer)
        made = divide(cut, programs, 16, tokens)
        assert len(made.items) <= len(cut) + programs
        read: dict[int, list[tuple[int, int, int]]] = {}
        for span, row, size, begin, end, part in made.items.tolist():
            assert begin < end
            assert places[span].row <= row < row + size <= places[span].row + places[span].size
            assert size <= tokens
            read.setdefault(row, []).append((begin, end, part))
        rows = set()
        merged = {row: (first, count) for row, first, count in made.merges.tolist()}
        assert len(merged) == len(made.merges)
        for span, row, size, lowest, stop in cut.tolist():
            rows |= set(range(row, row + size))
            pieces = sorted(read.pop(row))
            assert lowest == layer.first_key(places[span].start + row - places[span].row)
            assert [pieces[0][0], *(end for _, end, _ in pieces)] == [*(begin for begin, _, _ in pieces), stop]
            if len(pieces) == 1:
                assert pieces[0][2] == -1
                assert row not in merged
            for token in range(size if len(pieces) > 1 else 0):
                first, count = merged.pop(row + token)
                assert [first + n * tokens for n in range(count)] == [part + token for _, _, part in pieces]
        assert not read
        assert not merged
        assert rows == set(range(sum(size for _, size in work)))


def test_empty_items_and_merges_do_nothing() -> None:
    made = divide(tiles(places_of([(5000, 1), (3, 1)]), range(2), 1, FULL), 4, 64, 1)
    flat = made.pad(9, 3).reshape(-1)
    items, merges = flat[:54].reshape(9, 6), flat[54:].reshape(3, 3)
    assert items[: len(made.items)].tolist() == made.items.tolist()
    assert items[len(made.items) :].tolist() == [[0, 0, 0, 0, 0, -1]] * (9 - len(made.items))
    assert merges.tolist() == [*made.merges.tolist(), [-1, 0, 0], [-1, 0, 0]]


def blocks_of(made: WorkList) -> list[int]:
    """Blocks of keys that each program reads, in the order in which they start."""
    items = [-(-(end - begin) // BLOCK) for _, _, _, begin, end, _ in made.items.tolist()]
    return [blocks for blocks in items for _ in range(KEY_HEADS)]


def longest(programs: list[int], places: int = 2 * PROCESSORS) -> int:
    """Blocks of keys that are read one after the other, if ``places`` programs run at a time."""
    busy = [0] * places
    for blocks in programs:
        heapq.heapreplace(busy, busy[0] + blocks)
    return max(busy)


def decode_of(lengths: list[int]) -> list[int]:
    work = [(length - 1, 1) for length in lengths]
    return blocks_of(divide(tiles(places_of(work), range(len(work)), 1, FULL), 2 * PROCESSORS // KEY_HEADS, BLOCK, 1))


@pytest.mark.parametrize(
    "lengths", [[1024] * 63 + [65536], [1024] * 127 + [131072], [512] * 7 + [32768], [1024] * 255 + [65536] * 2]
)
def test_one_long_history_among_short_ones_takes_no_longer_than_the_same_keys_spread_evenly(lengths: list[int]) -> None:
    mixed, even = decode_of(lengths), decode_of([sum(lengths) // len(lengths)] * len(lengths))
    assert longest(mixed) <= 1.4 * longest(even), (longest(mixed), longest(even))
    assert len(mixed) <= len(lengths) * KEY_HEADS + 2 * PROCESSORS


def test_one_history_fills_the_device() -> None:
    programs = decode_of([65536])
    assert 0.9 * 2 * PROCESSORS <= len(programs) <= 2 * PROCESSORS + KEY_HEADS
    assert max(programs) == min(programs) or max(programs) <= 32
