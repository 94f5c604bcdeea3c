"""The index of a timeline's n-grams says the same however the timeline grew."""

from __future__ import annotations

import random
from array import array

import numpy as np

from cache.media_ids import MEDIA
from scheduler.core.ngrams import SIZE, NgramIndex, key_of, keys_of


def test_the_key_of_one_more_token_is_that_of_all_at_once() -> None:
    draw = random.Random(1)
    ids = array("i", [draw.choice((0, 1, 7, 150_000, MEDIA, MEDIA + 12345, 2**31 - 1)) for _ in range(200)])
    keys = keys_of(np.array(ids, np.int32)).tolist()
    assert keys == [key_of(ids[at : at + SIZE]) for at in range(len(ids) - SIZE + 1)]
    assert len(set(keys)) == len({tuple(ids[at : at + SIZE]) for at in range(len(ids) - SIZE + 1)})


def test_what_is_found_does_not_depend_on_how_a_timeline_grew() -> None:
    draw = random.Random(2)
    one_by_one, in_pieces, ids, found = NgramIndex(), NgramIndex(), array("i"), 0
    for number in range(600):
        ids.append(draw.randrange(6))
        match = one_by_one.find(ids)
        if number % 7 == 0:
            assert match == in_pieces.find(ids) == NgramIndex().find(ids)
        if match is not None:
            found += 1
            assert ids[match.stop - match.length : match.stop] == ids[len(ids) - match.length :]
    assert found > 300
