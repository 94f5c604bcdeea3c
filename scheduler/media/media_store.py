"""``MediaStore``: the pictures or sounds that the engine knows, and what its encoder has made of them."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cache.media_ids import LEAST, MEDIA, media_ids
from cache.pages.timeline_media import PlacedMedium, TimelineMedia
from cache.segments.chain import Owner
from scheduler.media.eyes import Eyes
from scheduler.media.joint_sight import JointSight
from scheduler.media.row_files import RowFiles, medium_name
from scheduler.media.senses import SOUNDS
from scheduler.media.sight import EncodedRows, Sight

BUDGET = 1 << 30  # bytes of media and rows that are kept


class NotTogether(Exception):
    """A timeline has media that the model does not take in one; the message says which it takes."""


class UnknownMedium(Exception):
    """A timeline has rows of a medium that is not known here."""


@dataclass(eq=False)
class Medium:
    """A picture or sound: ``data`` are its bytes, ``text`` stands for it in a prompt, ``ids`` are the media ids of its
    rows; ``kept`` are the inputs that positions depend on. ``rows``: what the encoder made of it, while somebody keeps
    it. ``shapes``: of what the encoder is fed. ``file``: the name of the rows in ``files``. ``eyes``: for its kind.
    """

    data: bytes
    text: str
    ids: array[int]
    kept: dict[str, Any]
    eyes: Eyes
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    rows: EncodedRows | None = None
    file: str = ""
    files: RowFiles | None = None

    @property
    def sight(self) -> Sight:
        return self.eyes.sight

    @property
    def stored(self) -> bool:
        """Whether its rows are in memory or on disk."""
        return self.rows is not None or (self.files is not None and self.file in self.files)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return len(self.data) + 4 * len(self.ids) + (self.rows.nbytes if self.rows is not None else 0)


class MediaStore:
    """Media by tenant and digest; the least recently used ones are forgotten. Nothing is lost by it: the server has
    their bytes, and a turn holds the media that it needs.
    """

    def __init__(
        self,
        eyes: Eyes,
        budget: int = BUDGET,
        files: RowFiles | None = None,
        fingerprint: str = "",
    ) -> None:
        """``files``: None without a disk tier. ``fingerprint``: of the model."""
        self._eyes = {one.kind: one for one in eyes.every}
        self._joint = JointSight([one.sight for one in eyes.every]) if eyes.others else eyes.sight
        self._apart = eyes.apart
        self.sight = eyes.sight
        self.files = files
        self._model = fingerprint
        self.encoded = 0  # media
        self.passes = 0  # of the encoder
        self.seconds = 0.0  # that they took
        self._budget = budget
        self._known: OrderedDict[tuple[str, str], Medium] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def find(self, tenant: str, digest: str) -> Medium | None:
        found = self._known.get((tenant, digest))
        if found is not None:
            self._known.move_to_end((tenant, digest))
        return found

    def make(self, digest: str, data: bytes, kind: str = "") -> Medium:
        """Process a medium of a kind; takes a while, and may be called on any thread. Raises ValueError if it cannot be
        used.
        """
        eyes = self._eyes.get(kind or self.sight.sense.kind)
        if eyes is None:
            raise ValueError("this model does not take media of this kind")
        processed, sight = eyes.processor.process([data]), eyes.sight
        rows = processed.ids.count(sight.placeholder)
        if rows < LEAST:
            too = "short" if sight.sense is SOUNDS else "small"
            raise ValueError(f"the {sight.sense.noun} is too {too} for this model")
        ids = media_ids(f"{digest} {eyes.processor.fingerprint}", rows)
        kept = sight.position_inputs(processed.inputs)
        return Medium(data, processed.text, ids, kept, eyes, _shapes(processed.inputs))

    def add(self, tenant: str, digest: str, medium: Medium) -> Medium:
        """Know a medium from now on; returns the one that was known already, if there is one."""
        known = self._known.setdefault((tenant, digest), medium)
        if known is medium:
            medium.file = medium_name(tenant, digest, medium.eyes.processor.fingerprint, self._model)
            medium.files = self.files
            self._bytes += medium.nbytes
            self._trim()
        return known

    def place(self, tenant: str, ids: array[int], digests: Sequence[str]) -> TimelineMedia:
        """The media of a timeline with media ids, which are among ``digests``. Raises UnknownMedium and
        NotTogether.
        """
        media = [found for digest in dict.fromkeys(digests) if (found := self.find(tenant, digest)) is not None]
        by_first = {medium.ids[0]: medium for medium in media}
        numbers = np.frombuffer(ids, np.int32)
        places = np.flatnonzero(numbers >= MEDIA)
        placed: list[PlacedMedium] = []
        at = 0
        while at < len(places):
            medium = by_first.get(int(numbers[places[at]]))
            if medium is None:
                raise UnknownMedium
            here = places[at : at + len(medium.ids)]
            if numbers[here].tolist() != medium.ids.tolist():
                raise UnknownMedium
            placed.append(PlacedMedium(medium, here))
            at += len(here)
        mine = [one.medium for one in placed if isinstance(one.medium, Medium)]
        self._check_together([one.eyes for one in mine])
        return self._joint.place(ids, placed, [one.kept for one in mine])

    def _check_together(self, eyes: Sequence[Eyes]) -> None:
        """``eyes`` of each medium of a timeline. Raises NotTogether."""
        for one in dict.fromkeys(eyes):
            if one.sight.single and eyes.count(one) > 1:
                raise NotTogether(f"The model takes one {one.processor.sense.noun} in a conversation.")
            if self._apart and eyes.count(one) < len(eyes):
                raise NotTogether("The model takes media of one kind in a conversation.")

    def keep(self, owner: Owner, media: TimelineMedia) -> None:
        """Have a session keep the rows of its media on disk, those that there are."""
        for placed in media.media if self.files is not None else ():
            if self.files is not None and isinstance(placed.medium, Medium):
                rows = placed.medium.rows
                self.files.keep(owner, placed.medium.file, None if rows is None else (rows.rows, *rows.levels))

    def encode(self, media: Sequence[Medium]) -> None:
        """Find the rows of media on disk, or make those that are not there: one encoder pass. Raises what the model
        does, and ValueError if the rows are not as many as were counted. Several ``media`` have one kind and shape.
        """
        for medium in media:
            self._set_rows(medium, self._read(medium))
        lacking = [medium for medium in media if medium.rows is None]
        if not lacking:
            return
        started = time.perf_counter()
        eyes = lacking[0].eyes
        made = eyes.sight.encode(eyes.processor.process([medium.data for medium in lacking]))
        self.encoded += len(lacking)
        self.passes += 1
        self.seconds += time.perf_counter() - started
        counts = [len(medium.ids) for medium in lacking]
        if len(made.rows) != sum(counts):
            raise ValueError("the encoder makes another number of rows than the processor has counted")
        for medium, rows in zip(lacking, made.split(counts), strict=True):
            self._set_rows(medium, rows)

    def _set_rows(self, medium: Medium, rows: EncodedRows | None) -> None:
        before = medium.nbytes
        medium.rows = rows
        if any(known is medium for known in self._known.values()):
            self._bytes += medium.nbytes - before
            self._trim()

    def _read(self, medium: Medium) -> EncodedRows | None:
        """Its rows from disk, if they are there."""
        parts = self.files.load(medium.file) if self.files is not None else None
        like = medium.sight.like
        if parts is None or like is None or len(parts[0]) != len(medium.ids):
            return None
        first, *levels = (part.to(medium.sight.model.device) for part in parts)
        return EncodedRows(first, tuple(levels), like.like)

    def _trim(self) -> None:
        """Forget the least recently used media beyond the budget, but not the newest."""
        while self._bytes > self._budget and len(self._known) > 1:
            _, medium = self._known.popitem(last=False)
            self._bytes -= medium.nbytes


def _shapes(inputs: dict[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(getattr(value, "shape", ()))) for name, value in sorted(inputs.items()))
