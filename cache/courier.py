"""Between disk and the remote tier: named sessions' files go up when they are written and come back when asked for."""

from __future__ import annotations

from collections.abc import Callable

from cache import files
from cache.background import Lane
from cache.chain import Owner, Segment
from cache.disk import DiskTier, folder_of
from cache.files import Doubt
from cache.remote import RemoteTier
from cache.segment import read_header

_MOST = 10_000  # files of one timeline


class Courier:
    """One thread between two tiers. What fails is counted and left: the remote tier is a copy, never the only truth.

    A session is looked for by its name, once, when no other tier knows it; anonymous ones stay on this machine.
    """

    def __init__(self, disk: DiskTier, remote: RemoteTier, lane: Lane, budget: int | None = None) -> None:
        self.errors = 0
        self._budget = budget
        self._counted = False  # what lies in the remote tier, others' files included
        self._disk = disk
        self._remote = remote
        self._lane = lane
        self._asked: dict[Owner, bool] = {}  # whether the answer is there

    @property
    def remote(self) -> RemoteTier:
        """The tier."""
        return self._remote

    def upload(self, segment: Segment) -> None:
        """Copy a named session's file, and those before it that are not there yet."""
        self._asked.pop(segment.owner, None)
        line = [s for s in segment.chain() if not s.remote]
        self._disk.hold(segment)

        def put() -> None:
            for s in line:
                self._remote.put(s.folder, s.name, self._disk.folder / s.folder / s.name)
            if self._budget is not None and (not self._counted or self._remote.used > self._budget):
                self._counted = True
                self._remote.collect(lambda folder: folder == segment.folder)

        def finish(outcome: Exception | None) -> None:
            self._disk.let_go(segment)
            for s in line:
                s.remote = outcome is None
            self._count(outcome)

        self._lane.submit(put, finish)

    def recalls(self, owner: Owner) -> bool:
        """Whether to wait for what the remote tier knows of a session; asks when it was not asked yet."""
        if self._disk.head(owner) is not None or (self._remote.away and owner not in self._asked):
            return False
        if owner not in self._asked:
            self._asked[owner] = False
            self._lane.submit(lambda: self._download(folder_of(owner)), lambda outcome: self._take(owner, outcome))
        return not self._asked[owner]

    def forget(self, owner: Owner, told: Callable[[], None]) -> None:
        """Remove a session there; ``told`` is called when that is done."""
        self._asked[owner] = True

        def finish(outcome: Exception | None) -> None:
            self._count(outcome)
            if outcome is None:
                self._asked.pop(owner, None)
                told()

        self._lane.submit(lambda: self._remote.remove(folder_of(owner), None), finish)

    def _download(self, folder: str) -> set[str]:
        """On the courier's thread: the newest file of a folder and all before it; the folders that got files."""
        names = sorted(name for name, _ in self._remote.names(folder))
        place = (folder, names[-1]) if names else None
        touched: set[str] = set()
        for _ in range(_MOST):
            if place is None:
                break
            path = self._disk.folder / place[0] / place[1]
            if path.exists():
                break
            files.make_folder(path.parent)
            self._remote.get(*place, path)
            touched.add(place[0])
            try:
                parent = read_header(path.parent, path.name).parent
            except Doubt:
                break  # adopting it will refuse it
            place = None if parent is None else _place(parent)
        return touched

    def _take(self, owner: Owner, outcome: set[str] | Exception) -> None:
        self._asked[owner] = True
        if isinstance(outcome, Exception):
            self._count(outcome)
            return
        self._disk.adopt(outcome)
        head = self._disk.head(owner)
        if head is not None:
            head.recalled = True
            for segment in head.tip.chain():
                segment.remote = True

    def _count(self, outcome: object) -> None:
        if isinstance(outcome, Exception):
            self.errors += 1
            if not isinstance(outcome, OSError):
                raise outcome


def _place(parent: str) -> tuple[str, str]:
    folder, _, name = parent.partition("/")
    return folder, name
