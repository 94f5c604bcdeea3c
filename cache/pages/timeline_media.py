"""``TimelineMedia``: what a timeline with pictures has besides its token ids: positions of several axes, and the rows
that encoders have made of the pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import numpy as np

from cache.media_ids import MEDIA


class BothWays(StrEnum):
    """Which keys besides those of its layer a row of a picture sees: none, or all rows of its picture, also later
    ones.
    """

    NEVER = "never"
    EVERYWHERE = "in every layer"  # within the window, if the layer has one
    WINDOWS = "in windowed layers"  # within the window
    BEYOND = "beyond windows too"  # in every layer, whatever its window is


class Encoded(Protocol):
    """A medium whose rows may have been computed."""

    @property
    def rows(self) -> Any:
        """What the encoder made of it; None if nobody has it now."""

    @property
    def stored(self) -> bool:
        """Whether that is in memory or on disk."""


@dataclass(frozen=True, eq=False)
class PlacedMedium:
    """A medium in a timeline: ``places`` are the positions of its rows, in order, int64."""

    medium: Encoded
    places: np.ndarray[Any, Any]


class FedRows(NamedTuple):
    """FedRows ``first .. stop`` of a medium."""

    medium: Any
    first: int
    stop: int


class TimelineMedia:
    """The media of one prompt. It stays valid while tokens are appended to the timeline."""

    def __init__(
        self,
        ids: Sequence[int],
        media: Sequence[PlacedMedium],
        positions: np.ndarray[Any, Any] | None = None,
        rule: BothWays = BothWays.NEVER,
    ) -> None:
        """``positions``: ``[axes, len(ids)]`` int64; None: the position of a token is its index."""
        self.media = tuple(media)
        self.rule = rule
        self._positions = positions
        marked = np.asarray(ids, np.int64) >= MEDIA
        begins = marked & ~np.concatenate([[False], marked[:-1]])
        self._blocks = np.where(marked, np.cumsum(begins) - 1, -1)  # rows that follow each other, whatever their medium

    @property
    def axes(self) -> int:
        """Of its positions; 0 if positions are indices."""
        return 0 if self._positions is None else len(self._positions)

    def positions(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Those of tokens ``start .. stop``, ``[axes, stop - start]`` int64. Behind the prompt they count on from the
        largest one.
        """
        assert self._positions is not None
        known = self._positions.shape[1]
        behind = np.arange(max(start, known), stop) - known + self._positions.max() + 1
        return np.concatenate([self._positions[:, start:stop], np.tile(behind, (len(self._positions), 1))], 1)

    def blocks(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """For each token ``start .. stop`` the number of the block of rows that it is in, -1 for a token of text."""
        behind = np.full(stop - max(start, len(self._blocks)) if stop > len(self._blocks) else 0, -1)
        return np.concatenate([self._blocks[start:stop], behind])

    def looks_ahead(self, start: int, stop: int) -> bool:
        """Whether tokens ``start .. stop`` have rows that see later ones."""
        return self.rule is not BothWays.NEVER and bool((self._blocks[start:stop] >= 0).any())

    def rows(self, start: int, stop: int) -> Iterator[FedRows]:
        """The rows of media that are fed with tokens ``start .. stop``, in their order."""
        for placed in self.media:
            first, last = np.searchsorted(placed.places, [start, stop])
            if first < last:
                yield FedRows(placed.medium, int(first), int(last))

    def first_missing(self, start: int) -> PlacedMedium | None:
        """The first medium with rows at ``start`` or behind it that no encoder's output is there for."""
        return next(iter(self.all_missing(start)), None)

    def all_missing(self, start: int) -> list[PlacedMedium]:
        """All media with rows at ``start`` or behind it that no encoder's output is there for; each once."""
        found = {id(p.medium): p for p in reversed(self.media) if p.places[-1] >= start and p.medium.rows is None}
        return sorted(found.values(), key=lambda placed: int(placed.places[0]))

    def to_encode(self, start: int) -> int:
        """How many media with rows at ``start`` or behind it an encoder has to be run on."""
        return sum(not placed.medium.stored for placed in self.all_missing(start))

    def feedable(self, start: int, count: int) -> int:
        """How many of the ``count`` tokens behind ``start`` can be fed in one step: those before a medium whose rows
        are missing. FedRows that see each other are fed together, even if they are more than ``count``.
        """
        stop, missing = start + count, self.first_missing(start)
        if missing is not None:
            stop = min(stop, max(start, int(missing.places[0])))
        if self.rule is BothWays.NEVER:
            return stop - start
        blocks = self._blocks
        cut = start < stop < len(blocks) and blocks[stop] >= 0 and blocks[stop] == blocks[stop - 1]
        if cut:
            block = np.flatnonzero(blocks == blocks[stop])
            whole = missing is None or block[-1] < missing.places[0]
            stop = int(block[-1]) + 1 if block[0] <= start and whole else max(start, int(block[0]))
        return stop - start
