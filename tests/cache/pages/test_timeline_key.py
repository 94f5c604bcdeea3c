"""Marked timelines: reversible, and told apart."""

from __future__ import annotations

from array import array

from cache.media_ids import MEDIA, uncut
from cache.pages.timeline_key import MARKED, TimelineKey, is_marked

IDS = array("i", [0, 1, 151_935, 7, 8, 9])


def test_only_the_first_tokens_are_marked_and_back() -> None:
    key = TimelineKey("a")
    marked = key.mark(IDS)
    assert marked[MARKED:] == IDS[MARKED:]
    assert all(token >= MEDIA for token in marked[:MARKED])
    assert is_marked(marked[0])
    assert not is_marked(IDS[0])
    for start in range(len(IDS)):
        assert key.plain(marked[start:], start) == IDS[start:]
        assert key.mark(IDS[start:], start) == marked[start:]


def test_other_weights_have_other_marks() -> None:
    first, second = TimelineKey("a").mark(IDS), TimelineKey("b").mark(IDS)
    assert all(one != other for one, other in zip(first[:MARKED], second[:MARKED], strict=True))
    assert TimelineKey("a").mark(IDS) == first


def test_nothing_goes_on_from_a_part_of_the_marks() -> None:
    marked = TimelineKey("a").mark(IDS)
    assert [uncut(marked, length) for length in range(len(IDS))] == [0, 0, 0, 0, 4, 5]
