"""Media ids: the ids that stand in a timeline for what a model sees of a picture. Both processes need them.

A model has one token, the placeholder, that stands for every row of every picture. In timelines each placeholder is
replaced by a number from 2**30 on that is derived from the picture's bytes, the processor and the row. So whatever
compares timelines (prefix index, segments on disk, the log) finds equal only what the model saw equal.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

MEDIA = 1 << 30  # ids from here on are media ids; no vocabulary is that large
_FIRST = 1 << 29  # set in the id of a medium's first row
LEAST = 4  # rows of a medium: below, its ids would be too few bits to tell it from others


def media_ids(identity: str, rows: int) -> array[int]:
    """The ids, int32, of a medium of that many rows. ``identity`` names its bytes and the processor; each id has 29
    bits of its hash.
    """
    numbers = array("I")
    numbers.frombytes(hashlib.shake_256(identity.encode()).digest(4 * rows))
    ids = array("i", [number % _FIRST | MEDIA for number in numbers])
    ids[0] |= _FIRST
    return ids


def is_first(token: int) -> bool:
    """Whether an id stands for the first row of a medium."""
    return token >= MEDIA and bool(token & _FIRST)


def count_media(ids: Sequence[int]) -> int:
    return sum(token >= MEDIA for token in ids)


def uncut(ids: Sequence[int], length: int) -> int:
    """The longest length, at most ``length``, behind which no row of a medium follows another one: media that follow
    each other immediately belong together.
    """
    while 0 < length < len(ids) and ids[length] >= MEDIA and not (is_first(ids[length]) and ids[length - 1] < MEDIA):
        length -= 1
    return length
