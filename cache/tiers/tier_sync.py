"""``TierSync``: copies segment files of named sessions from disk to a lower tier when they are written, and back when a
turn needs them.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from cache import whole_files
from cache.segments.chain import LooseSegment, Owner, Place, Segment
from cache.tier import Tier, TierHolding, TierStats
from cache.tiers.disk import DiskTier
from cache.tiers.io_threads import WorkQueue
from cache.tiers.segment_folder import FILE, FOLDER, folder_of
from cache.tiers.segment_store import SegmentStore
from cache.whole_files import CorruptFile

log = logging.getLogger("warmturn.engine")

_MOST = 10_000  # files of one timeline
_PATIENCE = 30.0  # seconds that a turn waits for an answer


@dataclass(eq=False)
class _Query:
    """A request to the lower tier for the files of a session."""

    since: float = field(default_factory=time.monotonic)
    answered: bool = False
    left: list[Place] = field(default_factory=list)  # files of a failed download that could not be unlinked


class _Download(NamedTuple):
    """What was downloaded: the segments of files that were not on disk, and the names of all files of the session in
    the lower tier.
    """

    fresh: dict[Place, LooseSegment]
    names: set[str]


class TierSync:
    """Copies files between the disk and one ``lower`` tier. Failures are counted and not retried: the lower tier only
    ever has copies.

    A session is looked up by its name, once, if the disk does not know it or may have only its beginning. Anonymous
    sessions are not copied. Files are copied one session at a time, so that a lookup waits for at most one of these. If
    a timeline begins in other sessions' files, those files are kept as long as the timeline.
    """

    def __init__(self, disk: DiskTier, lower: SegmentStore, queue: WorkQueue) -> None:
        self.errors = 0
        self.lower = lower
        self._counted = False  # what lies in the lower tier, others' files included
        self._disk = disk
        self._queue = queue
        self._waiting: OrderedDict[Owner, Segment] = OrderedDict()  # to be copied, up to this segment
        self._copying = False
        self._asked: dict[Owner, _Query] = {}
        self._forgetting: dict[Owner, object] = {}  # forgotten, but maybe not in the lower tier yet

    @property
    def stats(self) -> TierStats:
        return TierStats(self.lower.used, self.lower.budget or 0, self.lower.evictions)

    def holding(self, tip: Segment, tokens: int) -> TierHolding:
        """What the lower tier holds of the first ``tokens`` of the timeline that ends in ``tip``."""
        copied = list(takewhile(lambda segment: self.lower.tier in segment.copies, tip.chain()))
        stop = copied[-1].stop if copied else 0
        return TierHolding(min(tokens, stop), sum(segment.nbytes for segment in copied))

    def upload(self, segment: Segment) -> None:
        """Copy a named session's file to the lower tier, with its ancestors that are not there yet."""
        question = self._asked.get(segment.owner)
        if question is not None and question.answered:
            del self._asked[segment.owner]
        self._waiting[segment.owner] = segment
        self._next()

    def _next(self) -> None:
        while self._waiting and not self._copying:
            _, segment = self._waiting.popitem(last=False)
            if not segment.lost:
                self._copy(segment)

    def _copy(self, segment: Segment) -> None:
        chain = segment.chain()
        line = [s for s in chain if self.lower.tier not in s.copies]
        needed = {s.folder for s in chain}  # a fork's files go on from those in other sessions' folders
        gone: set[str] = set()
        self._disk.hold(segment)
        self._copying = True

        def keep(folder: str) -> bool:
            if folder not in needed:
                gone.add(folder)
            return folder in needed

        def put() -> None:
            for s in line:
                self.lower.put(s.folder, s.name, self._disk.folder / s.folder / s.name)
            self.lower.touch(needed)
            budget = self.lower.budget
            if budget is not None and (not self._counted or self.lower.used > budget):
                self._counted = True
                self.lower.collect(keep)

        def finish(outcome: Exception | None) -> None:
            self._copying = False
            self._disk.release(segment)
            for s in line:
                s.copies = s.copies | {self.lower.tier} if outcome is None else s.copies - {self.lower.tier}
            self._lost(gone)
            self._count(outcome)
            self._next()

        self._queue.submit(put, finish)

    def _lost(self, folders: set[str]) -> list[Segment]:
        """The lower tier has dropped these folders: mark their segments as not copied, and return them. They are copied
        again with the next upload of a session that depends on them.
        """
        segments = self._disk.segments_in(folders) if folders else []
        for segment in segments:
            segment.copies -= {self.lower.tier}
        return segments

    def awaits_download(self, owner: Owner) -> bool:
        """Whether a turn should wait for the lower tier's files of a session; requests them the first time."""
        head = self._disk.head(owner)
        if (head is not None and self.lower.tier not in head.unasked) or (self.lower.away and owner not in self._asked):
            return False
        if owner in self._forgetting:
            return False
        question = self._asked.get(owner)
        if question is None:
            question = asked = self._asked[owner] = _Query()
            self._queue.submit(
                lambda: self._download(folder_of(owner), asked.left),
                lambda outcome: self._take(owner, asked, outcome),
            )
        return not question.answered and time.monotonic() - question.since < _PATIENCE

    def block(self, owner: Owner) -> object:
        """Ignore a session that is being forgotten: its files are neither requested nor accepted, on their own or with
        a fork, until ``forget`` succeeds with the newest mark that this method has returned.
        """
        mark = self._forgetting[owner] = object()
        self._asked.pop(owner, None)
        return mark

    def forget(self, owner: Owner, mark: object, callback: Callable[[], None]) -> None:
        """Remove a session from the lower tier; ``callback`` is called when that is done."""
        self._waiting.pop(owner, None)

        def finish(outcome: Exception | None) -> None:
            self._count(outcome)
            lost = set(self._lost({folder_of(owner)}))  # others go on from them, or a new session has that name
            for head in self._disk.heads.values() if lost else ():
                if head.owner.named and not lost.isdisjoint(head.tip.chain()):
                    self._waiting[head.owner] = head.tip
            self._next()
            if outcome is None:
                if self._forgetting.get(owner) is mark:  # else it is being forgotten again
                    del self._forgetting[owner]
                callback()

        self._queue.submit(lambda: self.lower.remove(folder_of(owner), None), finish)

    def _download(self, folder: str, left: list[Place]) -> _Download:
        """On the queue's thread: get the newest file of a folder and its ancestors that are not on disk. All or none
        are kept, except files in ``left`` that could not be unlinked. Raises OSError or CorruptFile.
        """
        names = {name for name, _ in self.lower.names(folder)}
        place: Place | None = (folder, max(names)) if names else None
        fresh: dict[Place, LooseSegment] = {}
        try:
            while place is not None and place not in fresh and len(fresh) < _MOST:
                path = self._disk.folder / place[0] / place[1]
                if path.exists():
                    break
                whole_files.make_folder(path.parent)
                self.lower.get(*place, path)
                fresh[place] = found = self._disk.segment_folder.read_segment(place)
                place = None if found.parent is None else _check(found.parent)
        except BaseException:
            left += unlink(self._disk.folder, [*fresh, *([place] if place is not None else [])])
            raise
        return _Download(fresh, names)

    def _take(self, owner: Owner, question: _Query, outcome: _Download | Exception) -> None:
        question.answered = True
        if isinstance(outcome, Exception):
            self._disk.discard_files(question.left)
            self._count(outcome)
            return
        refused = {place for place, found in outcome.fresh.items() if found.segment.owner in self._forgetting}
        fresh = {place: found for place, found in outcome.fresh.items() if place not in refused}
        self._disk.adopt(fresh, time.time(), unread=refused)
        self._disk.discard_files(outcome.fresh)  # what was refused, and what goes on from that
        head = self._disk.head(owner)
        if head is None or owner in self._forgetting:
            return  # it is not asked for again
        del self._asked[owner]
        if fresh:
            head.unasked, head.source = frozenset(), self.lower.tier
        else:
            head.unasked, head.source = head.unasked - {self.lower.tier}, Tier.DISK
        for segment in head.tip.chain():
            at = (segment.folder, segment.name)
            if at in fresh or (segment.owner == owner and segment.name in outcome.names):
                segment.copies |= {self.lower.tier}

    def _count(self, outcome: object) -> None:
        if isinstance(outcome, Exception):
            self.errors += 1
            if not isinstance(outcome, (OSError, CorruptFile)):
                log.error("the %s tier failed", self.lower.tier, exc_info=outcome)


def unlink(folder: Path, places: list[Place]) -> list[Place]:
    """Unlink these files if they exist. Returns those that could not be unlinked."""
    left = []
    for place in places:
        try:
            whole_files.remove(folder / place[0], [place[1]])
        except FileNotFoundError:
            continue
        except OSError:
            left.append(place)
    return left


def _check(place: Place) -> Place:
    if not FOLDER.fullmatch(place[0]) or not FILE.fullmatch(place[1]):
        raise CorruptFile("not a place of a file")
    return place
