"""``TimelineKey``: tells the KV of timelines with an adapter from that of the same tokens without it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

from cache.media_ids import LEAST, MEDIA

MARKED = LEAST  # tokens at the beginning of a timeline that are marked: 116 bits of the adapter's digest
_IDS = 1 << 29
_FIRST = 1 << 29  # as of the first row of a medium: nothing goes on from a part of the marked tokens


class TimelineKey:
    """KV depends on the weights that computed it. So the cache knows the first tokens of such a timeline by other ids
    than the model's, from ``MEDIA`` on: the token's id shifted by a number that comes from the ``identity`` of the
    weights. Whatever compares timelines (prefix index, segments on disk, other servers' files) then finds equal only
    what the same weights have computed. Only what is fed to the model is ``plain``.
    """

    def __init__(self, identity: str) -> None:
        shifts = array("I")
        shifts.frombytes(hashlib.shake_256(f"adapter {identity}".encode()).digest(4 * MARKED))
        self._shifts = [shift % _IDS for shift in shifts]

    def mark(self, ids: Iterable[int], start: int = 0) -> array[int]:
        """The tokens ``ids`` of a timeline from position ``start`` on, as the cache knows them: int32."""
        found = array("i", ids)
        for at in range(min(len(found), max(0, MARKED - start))):
            number = (found[at] + self._shifts[start + at]) % _IDS | MEDIA
            found[at] = number if start + at else number | _FIRST
        return found

    def plain(self, ids: Iterable[int], start: int = 0) -> array[int]:
        """The reverse of ``mark``."""
        found = array("i", ids)
        for at in range(min(len(found), max(0, MARKED - start))):
            found[at] = (found[at] % _IDS - self._shifts[start + at]) % _IDS
        return found


def is_marked(first: int) -> bool:
    """Whether a timeline with this first token was computed with an adapter. No prompt begins with a picture."""
    return first >= MEDIA
