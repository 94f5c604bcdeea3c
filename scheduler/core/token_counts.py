"""``TokenCounts``: which tokens a turn has seen and how often it has generated each of them, for penalties."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

_FIRST = 64  # tokens for which there is room


class TokenCounts:
    """The counts of one turn. ``met``: tokens that count as seen although the turn has not generated them."""

    def __init__(self, met: Iterable[int] = ()) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(met))}
        room = max(_FIRST, 2 * len(self._places))
        self._ids, self._counts = np.zeros(room, np.int64), np.zeros(room, np.float32)
        self._ids[: len(self._places)] = list(self._places)
        self._known = 0

    def read(self, made: array[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """The tokens that were met, each once, and how often each was made: ``made`` is all that the turn has made, of
        which nothing is ever taken back. Valid until the next call.
        """
        for token in made[self._known :]:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                self._ids, self._counts = (np.concatenate([a, np.zeros_like(a)]) for a in (self._ids, self._counts))
            self._ids[place] = token
            self._counts[place] += 1
        self._known = len(made)
        size = len(self._places)
        return self._ids[:size], self._counts[:size]
