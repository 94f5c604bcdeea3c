"""``TimelineKey``: tells the KV of timelines with an adapter from that of the same tokens without it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator

from cache.media_ids import LEAST, MEDIA

MARKED = LEAST  # tokens of a timeline that are marked: 116 bits of the adapter's digest
_IDS = 1 << 29
_FIRST = 1 << 29  # as of the first row of a medium: nothing goes on from a part of the marked tokens


class TimelineKey:
    """KV depends on the weights that computed it. So the cache knows the first tokens that other weights compute, those
    from position ``begin`` on, by other ids than the model's, from ``MEDIA`` on: the token's id shifted by a number
    that comes from the ``identity`` of the weights. Whatever compares timelines (prefix index, segments on disk, other
    servers' files) then finds equal only what the same weights have computed. Only what is fed to the model is
    ``plain``. Without ``begin`` there are none: these weights compute what the model's do.
    """

    def __init__(self, identity: str, begin: int | None = 0) -> None:
        self.begin = begin
        shifts = array("I")
        shifts.frombytes(hashlib.shake_256(f"adapter {identity}".encode()).digest(4 * MARKED))
        self._shifts = [shift % _IDS for shift in shifts]

    def mark(self, ids: Iterable[int], start: int = 0) -> array[int]:
        """The tokens ``ids`` of a timeline from position ``start`` on, as the cache knows them: int32."""
        found = array("i", ids)
        for at, place in self._places(len(found), start):
            number = (found[at] + self._shifts[place]) % _IDS | MEDIA
            found[at] = number if place else number | _FIRST
        return found

    def plain(self, ids: Iterable[int], start: int = 0) -> array[int]:
        """The reverse of ``mark``."""
        found = array("i", ids)
        for at, place in self._places(len(found), start):
            found[at] = (found[at] % _IDS - self._shifts[place]) % _IDS
        return found

    def _places(self, count: int, start: int) -> Iterator[tuple[int, int]]:
        """Which of ``count`` tokens from position ``start`` on are marked, and the places of these among the marked."""
        if self.begin is None:
            return
        first = self.begin - start
        for at in range(max(0, first), min(count, first + MARKED)):
            yield at, at - first


def is_marked(first: int) -> bool:
    """Whether all of a timeline with this first token was computed with an adapter. No prompt begins with a picture."""
    return first >= MEDIA
