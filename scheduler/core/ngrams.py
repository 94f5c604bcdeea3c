"""Where the last tokens of a timeline occurred before: n-grams, as in prompt lookup decoding (Saxena, 2023)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SIZE = 3  # tokens of the shortest match
_LONGEST = 32  # tokens: longer matches are not told apart
_CANDIDATES = 16  # occurrences that are compared, the newest
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
_UINT64 = (1 << 64) - 1

Keys = npt.NDArray[np.uint64]


class Match(NamedTuple):
    """An earlier occurrence of the last ``length`` tokens, which ends before position ``stop``."""

    stop: int
    length: int


def keys_of(ids: npt.NDArray[np.int32]) -> Keys:
    """A key for each ``SIZE`` tokens in a row of ``ids [n]``: ``[n - SIZE + 1]``. Equal tokens have equal keys; others
    may.
    """
    if len(ids) < SIZE:
        return np.empty(0, np.uint64)
    parts = [ids[at : len(ids) - SIZE + 1 + at].astype(np.uint64) * np.uint64(_FACTORS[at]) for at in range(SIZE)]
    keys: Keys = parts[0] ^ parts[1] ^ parts[2]
    return keys


def key_of(ids: Sequence[int]) -> int:
    """The same for ``SIZE`` tokens."""
    key = 0
    for token, factor in zip(ids, _FACTORS, strict=True):
        key ^= token * factor & _UINT64
    return key


class NgramIndex:
    """The n-grams of one growing timeline. 8 bytes a token; a search reads all of them."""

    def __init__(self) -> None:
        self._keys = np.empty(1024, np.uint64)
        self._count = 0  # keys

    def find(self, ids: array[int], stop: int | None = None) -> Match | None:
        """The longest earlier occurrence, and of equals the newest, of the last tokens of ``ids``, in front of
        position ``stop`` (None: anywhere before the end). ``ids`` only grows from call to call.
        """
        self._extend(ids)
        last = self._count - 1
        if last < 1:
            return None
        upto = last if stop is None else min(last, max(0, stop - SIZE + 1))
        found = np.flatnonzero(self._keys[:upto] == self._keys[last])[-_CANDIDATES:]
        return longest_match(ids, found + SIZE, ids) if len(found) else None

    def _extend(self, ids: array[int]) -> None:
        """Add the keys of the tokens that are new."""
        count = len(ids) - SIZE + 1
        if count <= self._count:
            return
        if count > len(self._keys):
            self._keys = np.resize(self._keys, max(count, 2 * len(self._keys)))
        if count == self._count + 1:  # one more token, as in decoding: many times faster than arrays of one key
            self._keys[self._count] = key_of(ids[-SIZE:])
        else:
            self._keys[self._count : count] = keys_of(np.array(ids[self._count :], np.int32))
        self._count = count


def longest_match(text: Sequence[int], stops: npt.NDArray[np.int64], suffix: array[int]) -> Match | None:
    """Of the positions ``stops`` in ``text`` (ascending), the one in front of which the most tokens equal the last ones
    of ``suffix``; of equals the last. None if fewer than ``SIZE`` do.
    """
    best: Match | None = None
    for stop in reversed(stops.tolist()):
        length, most = 0, min(_LONGEST, stop, len(suffix))
        while length < most and text[stop - 1 - length] == suffix[-1 - length]:
            length += 1
        if length >= SIZE and (best is None or length > best.length):
            best = Match(stop, length)
            if length == _LONGEST:
                break
    return best
