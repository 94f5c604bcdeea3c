"""Between disk and the remote tier: named sessions' files go up when they are written and come back when asked for."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cache import files
from cache.background import Lane
from cache.chain import Found, Owner, Place, Segment
from cache.disk import FILE, FOLDER, DiskTier, folder_of
from cache.files import Doubt
from cache.remote import RemoteTier

log = logging.getLogger("warmturn.engine")

_MOST = 10_000  # files of one timeline
_PATIENCE = 30.0  # seconds that a turn waits for an answer


@dataclass(eq=False)
class _Question:
    """What the remote tier was asked about a session."""

    since: float = field(default_factory=time.monotonic)
    answered: bool = False


class Courier:
    """One thread between two tiers. What fails is counted and left: the remote tier is a copy, never the only truth.

    A session is looked for by its name, once, when no other tier knows it; anonymous ones stay on this machine. Files
    go up one session at a time, with all that it has by then, so that a question waits for one of them at most.
    """

    def __init__(self, disk: DiskTier, remote: RemoteTier, lane: Lane, budget: int | None = None) -> None:
        self.errors = 0
        self._budget = budget
        self._counted = False  # what lies in the remote tier, others' files included
        self._disk = disk
        self._remote = remote
        self._lane = lane
        self._waiting: OrderedDict[Owner, Segment] = OrderedDict()  # to be copied, up to this segment
        self._copying = False
        self._asked: dict[Owner, _Question] = {}

    @property
    def remote(self) -> RemoteTier:
        """The tier."""
        return self._remote

    def upload(self, segment: Segment) -> None:
        """Copy a named session's file, and those before it that are not there yet."""
        self._asked.pop(segment.owner, None)
        self._waiting[segment.owner] = segment
        self._next()

    def _next(self) -> None:
        while self._waiting and not self._copying:
            _, segment = self._waiting.popitem(last=False)
            if not segment.lost:
                self._copy(segment)

    def _copy(self, segment: Segment) -> None:
        line = [s for s in segment.chain() if not s.remote]
        self._disk.hold(segment)
        self._copying = True

        def put() -> None:
            for s in line:
                self._remote.put(s.folder, s.name, self._disk.folder / s.folder / s.name)
            if self._budget is not None and (not self._counted or self._remote.used > self._budget):
                self._counted = True
                self._remote.collect(lambda folder: folder == segment.folder)

        def finish(outcome: Exception | None) -> None:
            self._copying = False
            self._disk.let_go(segment)
            for s in line:
                s.remote = outcome is None
            self._count(outcome)
            self._next()

        self._lane.submit(put, finish)

    def recalls(self, owner: Owner) -> bool:
        """Whether to wait for what the remote tier knows of a session; asks when it was not asked yet."""
        if self._disk.head(owner) is not None or (self._remote.away and owner not in self._asked):
            return False
        question = self._asked.get(owner)
        if question is None:
            question = asked = self._asked[owner] = _Question()
            self._lane.submit(
                lambda: self._download(folder_of(owner)), lambda outcome: self._take(owner, asked, outcome)
            )
        return not question.answered and time.monotonic() - question.since < _PATIENCE

    def forget(self, owner: Owner, told: Callable[[], None]) -> None:
        """Remove a session there; ``told`` is called when that is done."""
        self._waiting.pop(owner, None)
        mark = self._asked[owner] = _Question(answered=True)

        def finish(outcome: Exception | None) -> None:
            self._count(outcome)
            head = self._disk.head(owner)
            for segment in head.tip.chain() if head is not None else ():  # a new session of that name
                segment.remote &= segment.owner != owner
            if outcome is None:
                if self._asked.get(owner) is mark:
                    del self._asked[owner]
                told()

        self._lane.submit(lambda: self._remote.remove(folder_of(owner), None), finish)

    def _download(self, folder: str) -> dict[Place, Found]:
        """On the courier's thread: the newest file of a folder and all before it that are not here; all or none."""
        names = sorted(name for name, _ in self._remote.names(folder))
        place: Place | None = (folder, names[-1]) if names else None
        fresh: dict[Place, Found] = {}
        try:
            while place is not None and place not in fresh and len(fresh) < _MOST:
                path = self._disk.folder / place[0] / place[1]
                if path.exists():
                    break
                files.make_folder(path.parent)
                self._remote.get(*place, path)
                fresh[place] = found = self._disk.look(place)
                place = None if found.parent is None else _checked(found.parent)
        except BaseException:
            remove(self._disk.folder, [*fresh, *([place] if place is not None else [])])
            raise
        return fresh

    def _take(self, owner: Owner, question: _Question, outcome: dict[Place, Found] | Exception) -> None:
        question.answered = True
        if isinstance(outcome, Exception):
            self._count(outcome)
            return
        self._disk.adopt(outcome, time.time())
        if self._asked.get(owner) is not question:  # forgotten, or written anew meanwhile
            self._disk.forget(owner)
            return
        head = self._disk.head(owner)
        if head is not None:
            head.recalled = True
            for segment in head.tip.chain():
                segment.remote = True

    def _count(self, outcome: object) -> None:
        if isinstance(outcome, Exception):
            self.errors += 1
            if not isinstance(outcome, (OSError, Doubt)):
                log.error("the remote tier failed", exc_info=outcome)


def remove(folder: Path, places: list[Place]) -> None:
    """Unlink these files, as far as they are there."""
    for place in places:
        with suppress(OSError):
            files.remove(folder / place[0], [place[1]])


def _checked(place: Place) -> Place:
    if not FOLDER.fullmatch(place[0]) or not FILE.fullmatch(place[1]):
        raise Doubt("not a place of a file")
    return place
