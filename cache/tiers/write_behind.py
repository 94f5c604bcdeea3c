"""``WriteBehind``: writes the new KV of idle sessions to disk in the background."""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch

from cache import whole_files
from cache.memory.codec import Codec
from cache.memory.memory_tier import MemoryTier
from cache.pages import state as states
from cache.pages.pool import Page, PagePool
from cache.pages.retention import Retention
from cache.pages.session import SessionCache
from cache.segments.chain import Segment
from cache.segments.segment_file import Header, timeline_hash, write
from cache.tiers import transfer
from cache.tiers.disk import DiskTier
from cache.tiers.disk_fault import DiskFault
from cache.tiers.io_threads import WorkQueue
from cache.tiers.segment_folder import file_name, folder_of

log = logging.getLogger("warmturn.engine")

_PAUSE = 5.0  # seconds without a write after one that failed
_QUIET = 0.25  # seconds without a turn after which sessions that were never continued are written
_WAIT = 120.0  # seconds after its turn when such a session is written though turns run, if its kind does go on
_PACE = 0.25  # seconds between two of these
_STUCK = 10.0  # seconds after which a write is not waited for
_PART = 1024  # tokens of a running session that are written, at least
_HEADER = 4096  # bytes of a file besides its tensors, about


_Run = tuple[MemoryTier, torch.Tensor, torch.Tensor | None]  # rows in it, and in the pools of windowed layers


class _Write(NamedTuple):
    """A file that is being written."""

    pages: list[Page]
    since: float


class _Written(NamedTuple):
    """The size of a complete file, and the free bytes of the file system after it."""

    nbytes: int
    free: int | None


class WriteBehind:
    """Idle sessions whose newest tokens are only in memory, and the writes that are in progress.

    A write holds its pages as a warm session would: until it is complete they are neither moved nor written to. At most
    about ``limit`` bytes are in progress. A session that waits meanwhile is written once with all its new tokens; named
    sessions go first. An anonymous session that no later turn has continued is written when no turn has run for a
    moment, or at shutdown: most of these are never used again, and writing them takes CPU time from turns. While turns
    run it is written two minutes after its own, unless conversations like it hardly ever go on (``retention``).
    """

    def __init__(
        self, pool: PagePool, disk: DiskTier, queue: WorkQueue, codec: Codec, limit: int, retention: Retention
    ) -> None:
        self.saves = 0  # files that are there
        self.written = 0  # bytes of them
        self.errors = 0
        self.fault = DiskFault()
        self.saved: Callable[[SessionCache, Segment], None] = lambda session, segment: (
            None
        )  # for each file that is there
        self._pool = pool
        self._disk = disk
        self._queue = queue
        self._codec = codec
        self._limit = limit
        self._retention = retention
        # named sessions, anonymous ones, and of those that were never continued the likely ones and the others
        self._wanted: tuple[OrderedDict[SessionCache, None], ...] = tuple(OrderedDict() for _ in range(4))
        self._idle_since: float | None = time.monotonic()
        self._cold: dict[SessionCache, None] = {}  # left the device before it was their turn
        self._under_way: dict[Segment, _Write] = {}  # oldest first
        self._bytes = 0
        self._newest = 0  # the highest sequence so far
        self._paused_until = 0.0
        self._check_at = 0.0
        self._unseen_at = 0.0
        self._next_once = 0.0

    @property
    def pending(self) -> int:
        """Sessions that are waiting to be written or are being written."""
        return sum(map(len, self._wanted)) + len(self._cold) + len(self._under_way)

    @property
    def ready(self) -> bool:
        """Whether a write could begin now, or after the quiet time."""
        wanted = self._wanted[:2] if self._idle_since is None else self._wanted
        return any(wanted) and time.monotonic() >= self._paused_until

    @property
    def working(self) -> bool:
        """Whether writes are making progress."""
        oldest = next(iter(self._under_way.values()), None)
        return oldest is not None and time.monotonic() - oldest.since < _STUCK

    def is_scheduled(self, session: SessionCache) -> bool:
        """Whether ``session`` will be written soon."""
        return any(session in wanted for wanted in self._wanted[:2])

    def is_stored(self, session: SessionCache) -> bool:
        """Whether complete files have all of an idle ``session``."""
        session.settle()
        return session.saved_length == session.length and session.saved not in self._under_way

    def set_idle(self, idle: bool) -> None:
        """Record whether no turn runs or waits now."""
        if not idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()

    @property
    def _quiet(self) -> bool:
        return self._idle_since is not None and time.monotonic() - self._idle_since >= _QUIET

    @property
    def held(self) -> Counter[Page]:
        """How many writes hold each page."""
        return Counter(page for write in self._under_way.values() for page in write.pages)

    @property
    def holds(self) -> int:
        """Pages held by writes, counted once per write."""
        return sum(len(write.pages) for write in self._under_way.values())

    def schedule(self, session: SessionCache) -> None:
        """``session`` is idle: schedule its unsaved tokens for writing."""
        session.settle()
        if session.saved_length < session.length:
            once = not session.continued and session.pinned_until <= time.time()
            seldom = once and not self._retention.may_return(session.stop)
            self._wanted[0 if session.name is not None else 1 + once + seldom][session] = None

    def unschedule(self, session: SessionCache) -> None:
        """``session`` runs or is dropped: begin no write of it. A write in progress continues."""
        for wanted in (*self._wanted, self._cold):
            wanted.pop(session, None)

    def begin_writes(self, everything: bool = False) -> None:
        """Begin as many writes as the limit allows; with ``everything``, all of them, also of sessions in the host
        tier.
        """
        if time.monotonic() < self._paused_until:
            return
        due = self._wanted if everything or self._quiet else self._wanted[:2]
        while everything or not self._under_way or self._bytes < self._limit:
            session = next((session for wanted in due for session in wanted), None)
            session = self._waiting_longest() if session is None else session
            if session is None:
                break
            self.unschedule(session)
            if session.warm or everything:
                self._begin(session)
            else:
                self._cold[session] = None
        if everything:
            for session in list(self._cold):
                del self._cold[session]
                self._begin(session)

    def _waiting_longest(self) -> SessionCache | None:
        """The session that was never continued and has waited longest, if that is long enough."""
        session = next(iter(self._wanted[2]), None)
        if session is None or session.stop is None:
            return None
        if self._retention.clock() - session.stop.since < _WAIT or time.monotonic() < self._next_once:
            return None
        self._next_once = time.monotonic() + _PACE
        return session

    def write_now(self, session: SessionCache) -> None:
        """Begin to write the unsaved tokens of an idle session, ahead of other sessions."""
        self.schedule(session)
        if any(session in wanted for wanted in self._wanted):
            self.unschedule(session)
            self._begin(session, copied=not session.warm)

    def write_unseen(self, session: SessionCache) -> None:
        """Begin to write what the windowed layers of a running session do not see any more of its prompt, so that it
        can make room; in large parts, as each is a file.
        """
        windows, page_size = self._pool.windows, self._pool.page_size
        if windows is None or self._bytes >= self._limit or time.monotonic() < self._paused_until:
            return
        stop = min(windows.first_key(session.length), session.asked) // page_size * page_size
        known = session.saved_length
        if stop - known >= _PART and time.monotonic() >= self._unseen_at:
            self._begin(session, stop=stop)
            if session.saved_length <= known:  # there was no room for it
                self._unseen_at = time.monotonic() + _PAUSE

    def _begin(self, session: SessionCache, copied: bool = False, stop: int | None = None) -> None:
        """Plan the file of all unsaved tokens or those before ``stop``, hold its pages and queue the write. With
        ``copied`` the pages are copied now, since pages that are not on the device may move while turns run.
        """
        session.settle()  # it may have waited for long
        first, stop = session.saved_length, session.length if stop is None else stop
        page_size = self._pool.page_size
        if self._pool.windows is not None and any(page.near < 0 for page in session.pages[first // page_size :]):
            return  # what was stored of it is gone, and so are keys of windowed layers
        segment = self._segment(session, first, stop)
        if not self._disk.begin(segment):  # it does not fit beside what is in use
            if self._disk.is_short_of(segment.nbytes):
                self.errors += 1
                self.fault.record("the disk is full, or all but --disk-floor of it", segment.nbytes)
            self._queue.submit(self._disk.segment_folder.measure, self._on_measured)
            return
        kept = {n: session.checkpoints[n] for n in segment.states}
        before = timeline_hash(session.token_ids[:first].tobytes(), bytes(session.mask[:first]))
        header = self._header(segment, session, before, stop)
        runs = _runs(session.pages, page_size, first, stop)
        copies = _gather(runs) if copied else None
        pages = [] if copied else session.pages[first // page_size : -(-stop // page_size)]
        self._pool.share(pages)
        self._pool.hold_warm(pages)
        if self._pool.windows is not None:
            self._pool.share_near(pages)
        self._under_way[segment] = _Write(pages, time.monotonic())
        self._bytes += segment.nbytes
        session.saved, session.saved_length = segment, stop
        self._queue.submit(
            lambda: self._write(segment, header, copies or _gather(runs), kept),
            lambda outcome: self._finish(session, segment, outcome),
        )

    def _segment(self, session: SessionCache, first: int, stop: int) -> Segment:
        head = self._disk.head(session.owner)
        newest = max(self._newest, head.tip.sequence if head is not None else 0)
        self._newest = sequence = max(int(time.time() * 1000), newest + 1)
        kept = {n: state for n, state in session.checkpoints.items() if first < n <= stop}
        return Segment(
            owner=session.owner,
            folder=folder_of(session.owner),
            name=file_name(sequence, uuid.uuid4().hex),
            sequence=sequence,
            parent=session.saved,
            first=first,
            tokens=session.token_ids[first:stop],
            mask=bytes(session.mask[first:stop]),
            after=timeline_hash(session.token_ids[:stop].tobytes(), bytes(session.mask[:stop])),
            states=tuple(kept),
            long=session.long,
            private=session.private,
            nbytes=(stop - first) * (self._pool.device.token_bytes + 5) + states.nbytes(kept) + _HEADER,
        )

    def _header(self, segment: Segment, session: SessionCache, before: bytes, stop: int) -> Header:
        parent = segment.parent
        return Header(
            fingerprint=self._disk.fingerprint,
            tenant=session.tenant,
            session=segment.owner.session,
            named=segment.owner.named,
            id=segment.name.partition("-")[2].removesuffix(".kv"),
            sequence=segment.sequence,
            parent=None if parent is None else f"{parent.folder}/{parent.name}",
            first=segment.first,
            stop=stop,
            tokens=segment.tokens.tobytes(),
            mask=segment.mask,
            before=before,
            after=segment.after,
            long=segment.long,
            private=segment.private,
            created=time.time(),
            codec=self._codec,
        )

    def _write(
        self, segment: Segment, header: Header, paged: dict[str, torch.Tensor], kept: dict[int, Any]
    ) -> _Written:
        """On the writer's thread."""
        tensors, facts = transfer.pack_states(kept)
        folder = self._disk.folder / segment.folder
        whole_files.make_folder(folder)
        done = write(folder, segment.name, msgspec.structs.replace(header, facts=facts), tensors | paged)
        return _Written(done.size, self._disk.segment_folder.measure())

    def _finish(self, session: SessionCache, segment: Segment, outcome: _Written | Exception) -> None:
        """On the owner's thread: a write has succeeded or failed."""
        pages = self._under_way.pop(segment).pages
        if self._pool.windows is not None:
            self._pool.drop_near(pages)
        self._pool.drop(pages, warm=True)
        self._bytes -= segment.nbytes
        if isinstance(outcome, _Written):
            self.fault.over()
            self.saves += 1
            self.written += outcome.nbytes
            self._disk.complete(segment, outcome.nbytes)
            self._disk.space.set_free(outcome.free)
            if not segment.dead:
                self.saved(session, segment)
            return
        self._disk.abort(segment)
        self.errors += 1
        self._paused_until = time.monotonic() + _PAUSE
        if not isinstance(outcome, OSError):  # the next try would end alike: it waits for the session's next turn
            log.error("a session could not be written", exc_info=outcome)
            return
        self.fault.record(outcome.strerror or type(outcome).__name__)
        if session.pages and not session.running:
            self.schedule(session)

    def check_room(self) -> None:
        """While the disk is full, measure its free space from time to time."""
        if self.fault.lacking and time.monotonic() >= self._check_at:
            self._check_at = time.monotonic() + _PAUSE
            self._queue.submit(self._disk.segment_folder.measure, self._on_measured)

    def _on_measured(self, outcome: int | Exception | None) -> None:
        self._disk.space.set_free(None if isinstance(outcome, Exception) else outcome)
        if self.fault.lacking and not self._disk.is_short_of(self.fault.lacking):
            self.fault.over()


def _gather(runs: list[_Run]) -> dict[str, torch.Tensor]:
    """A copy of the tokens of all runs, concatenated."""
    parts = [tier.gather(rows, near) for tier, rows, near in runs]
    return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _runs(pages: list[Page], page_size: int, first: int, stop: int) -> list[_Run]:
    """The rows of the tokens ``[first, stop)``, grouped into runs of pages in one tier."""
    runs: list[_Run] = []
    at = first
    while at < stop:
        tier = pages[at // page_size].tier
        end = at // page_size + 1
        while end * page_size < stop and pages[end].tier is tier:
            end += 1
        until = min(end * page_size, stop)
        near = transfer.rows_of(pages, page_size, at, until, near=True) if tier.near_layers else None
        runs.append((tier, transfer.rows_of(pages, page_size, at, until), near))
        at = until
    return runs
