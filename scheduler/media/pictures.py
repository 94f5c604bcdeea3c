"""``PictureStore``: the pictures that the engine knows, and what its encoder has made of them."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache.media_ids import LEAST, MEDIA, media_ids
from cache.pages.media import PlacedMedium, TimelineMedia
from scheduler.media.processor import Processor
from scheduler.media.senses import PICTURES
from scheduler.media.sight import EncodedRows, Sight

BUDGET = 1 << 30  # bytes of pictures and rows that are kept


class UnknownMedium(Exception):
    """A timeline has rows of a medium that is not known here."""


@dataclass(eq=False)
class Picture:
    """A picture: ``data`` are its bytes, ``text`` stands for it in a prompt, ``ids`` are the media ids of its rows;
    ``kept`` are the inputs that positions depend on. ``rows``: what the encoder made of it, while somebody keeps it.
    """

    data: bytes
    text: str
    ids: array[int]
    kept: dict[str, Any]
    rows: EncodedRows | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return len(self.data) + 4 * len(self.ids) + (self.rows.nbytes if self.rows is not None else 0)


class PictureStore:
    """Pictures by tenant and digest; the least recently used ones are forgotten. Nothing is lost by it: the server has
    their bytes, and a turn holds the pictures that it needs.
    """

    def __init__(self, sight: Sight, processor: Processor, budget: int = BUDGET) -> None:
        self.sight = sight
        self.encoded = 0  # encoder passes
        self.seconds = 0.0  # that they took
        self._processor = processor
        self._fingerprint = processor.fingerprint
        self._budget = budget
        self._known: OrderedDict[tuple[str, str], Picture] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def find(self, tenant: str, digest: str) -> Picture | None:
        """The picture, if it is known."""
        found = self._known.get((tenant, digest))
        if found is not None:
            self._known.move_to_end((tenant, digest))
        return found

    def make(self, digest: str, data: bytes) -> Picture:
        """Process a picture; takes a while, and may be called on any thread. Raises ValueError if it cannot be used."""
        processed = self._processor.process([data])
        rows = processed.ids.count(self.sight.placeholder)
        if rows < LEAST:
            too = "small" if self.sight.sense is PICTURES else "short"
            raise ValueError(f"the {self.sight.sense.noun} is too {too} for this model")
        ids = media_ids(f"{digest} {self._fingerprint}", rows)
        return Picture(data, processed.text, ids, self.sight.position_inputs(processed.inputs))

    def add(self, tenant: str, digest: str, picture: Picture) -> Picture:
        """Know a picture from now on; returns the one that was known already, if there is one."""
        known = self._known.setdefault((tenant, digest), picture)
        if known is picture:
            self._bytes += picture.nbytes
            self._trim()
        return known

    def place(self, tenant: str, ids: array[int], digests: Sequence[str]) -> TimelineMedia:
        """The media of a timeline with media ids, which are among ``digests``. Raises UnknownMedium."""
        pictures = [found for digest in dict.fromkeys(digests) if (found := self.find(tenant, digest)) is not None]
        by_first = {picture.ids[0]: picture for picture in pictures}
        numbers = np.frombuffer(ids, np.int32)
        places = np.flatnonzero(numbers >= MEDIA)
        placed: list[PlacedMedium] = []
        at = 0
        while at < len(places):
            picture = by_first.get(int(numbers[places[at]]))
            if picture is None:
                raise UnknownMedium
            mine = places[at : at + len(picture.ids)]
            if numbers[mine].tolist() != picture.ids.tolist():
                raise UnknownMedium
            placed.append(PlacedMedium(picture, mine))
            at += len(mine)
        return self.sight.place(ids, placed, [one.medium.kept for one in placed if isinstance(one.medium, Picture)])

    def encode(self, picture: Picture) -> None:
        """One encoder pass. Raises what the model does, and ValueError if the rows are not as many as were counted."""
        started = time.perf_counter()
        before = picture.nbytes
        rows = self.sight.encode(self._processor.process([picture.data]))
        self.encoded += 1
        self.seconds += time.perf_counter() - started
        if len(rows.rows) != len(picture.ids):
            raise ValueError("the encoder makes another number of rows than the processor has counted")
        picture.rows = rows
        if any(known is picture for known in self._known.values()):
            self._bytes += picture.nbytes - before
            self._trim()

    def _trim(self) -> None:
        """Forget the least recently used pictures beyond the budget, but not the newest."""
        while self._bytes > self._budget and len(self._known) > 1:
            _, picture = self._known.popitem(last=False)
            self._bytes -= picture.nbytes
