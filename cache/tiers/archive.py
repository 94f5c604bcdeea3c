"""``Archive``: the tiers below memory as the session store uses them. Idle sessions are written to disk, and loaded
when a turn needs them.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.media_ids import MEDIA, uncut
from cache.memory.codec import Codec
from cache.pages.pool import Page
from cache.pages.retention import Stop
from cache.pages.session import SessionCache, common_prefix
from cache.pages.session_memory import SessionMemory
from cache.pages.timeline_key import MARKED
from cache.segments.chain import ChainHead, Owner, Segment
from cache.tier import Tier, TierHolding, TierStats
from cache.tiers import segment_loader
from cache.tiers.disk import DiskTier
from cache.tiers.io_threads import IoThreads
from cache.tiers.remover import Remover
from cache.tiers.restore_rates import RestoreRates
from cache.tiers.segment_export import export_segments
from cache.tiers.segment_loader import SegmentLoad, SegmentLoader, SegmentRange
from cache.tiers.segment_store import SegmentStore
from cache.tiers.session_remover import SessionRemover
from cache.tiers.tier_sync import TierSync
from cache.tiers.write_behind import WriteBehind
from cache.whole_files import CorruptFile

_LOADS = 4  # concurrent loads, each on its own thread; each holds pages that are not used yet
_STUCK = 10.0  # seconds without a byte after which a load is not waited for
_STOPS = 4096  # sessions on disk of which the end of the last turn is known
_PENDING = 2 << 30  # bytes that may be on their way to disk, or a quarter of the device tier if that is less

ExportCallback = Callable[[int, int], None]


@dataclass(eq=False)
class Fetch:
    """The loading of a timeline for a turn that waits for it.

    If it has not ``begun`` it should be requested again: too many others are in progress, or the device has no ``room``
    now. When ``done``, ``tokens`` tokens beyond the ``have`` that were in memory are cached, up to ``length``, in an
    idle session that any turn may continue; they came from the tier ``source``. ``miss``: why not all of them.
    """

    begun: bool = True
    room: bool = True
    done: bool = False
    length: int = 0
    have: int = 0
    tokens: int = 0
    seconds: float = 0.0
    source: Tier = Tier.DISK
    miss: str | None = None
    load: SegmentLoad | None = None

    @property
    def stuck(self) -> bool:
        """Whether nothing was read for so long that turns should not wait for it."""
        return self.load is not None and not self.done and time.monotonic() - self.load.touched > _STUCK


class Archive:
    """The tiers below memory of a session store: the disk, and below it tiers with copies of its files, nearest first.

    All methods run on the store's thread. Files are read and written on other threads, and ``poll`` processes the
    results.
    """

    def __init__(
        self,
        store: SessionMemory,
        disk: DiskTier,
        codec: Codec = Codec.EXACT,
        lower: Sequence[SegmentStore] = (),
    ) -> None:
        """Scans the segment files on disk, which takes time if there are many. Raises OSError, and BlockingIOError if
        another process uses the folder.
        """
        self.disk = disk
        self.restore_rates = RestoreRates()
        self._store = store
        self._background = IoThreads()
        self._writer = self._background.queue("kv-writer", 1)
        pool = store.pool
        limit = min(_PENDING, pool.device.frames.pages(pool.device.slots) * pool.page_bytes // 4)
        self.write_behind = WriteBehind(pool, disk, self._writer, codec, limit, store.retention)
        self.write_behind.saved = self._segment_written
        self.loader = SegmentLoader(pool, self._background.queue("kv-reader", _LOADS))
        self.syncs = [TierSync(disk, tier, self._background.queue(f"kv-{tier.tier}", 1)) for tier in lower]
        self._fetches: dict[Owner, Fetch] = {}
        self._arriving: dict[SegmentLoad, Owner] = {}  # whose session each load will be
        self._taking: dict[object, Owner] = {}  # and each import whose files are looked at
        self._stops: OrderedDict[Owner, Stop] = OrderedDict()  # of the newest sessions on disk
        self.remover = Remover(disk, self._writer)
        self.session_remover = SessionRemover(disk, self.syncs, self.remover, self._writer)
        disk.scan()
        self.remover.begin()

    # -- every step -------------------------------------------------------------------------------------------------

    def poll(self, idle: bool = True) -> None:
        """Process finished reads and writes, and begin new writes. ``idle``: no turn runs or waits."""
        self._background.poll()
        self.write_behind.set_idle(idle)
        self.write_behind.begin_writes()
        self.write_behind.check_room()
        self._store.residency.trim()
        self.session_remover.poll()
        self.remover.begin()

    @property
    def _skeleton(self) -> Any:
        return self._store.skeleton if self._store.stateful else None

    @property
    def busy(self) -> bool:
        """Whether work is in progress, or could be begun."""
        return self._background.busy or self.write_behind.ready or self.session_remover.waiting

    @property
    def errors(self) -> int:
        """How many writes, reads and removals have failed."""
        return self.write_behind.errors + self.loader.errors + self.remover.errors

    @property
    def held(self) -> Counter[Page]:
        return self.write_behind.held

    def stats(self) -> dict[Tier, TierStats]:
        return {Tier.DISK: self.disk.stats} | {sync.lower.tier: sync.stats for sync in self.syncs}

    def holdings(self, owner: Owner, session: SessionCache | None) -> dict[Tier, TierHolding]:
        """What each tier below memory holds of the timeline of ``session``, or of whatever is stored of ``owner`` if
        ``session`` is None.
        """
        head = self.disk.head(owner)
        if head is None:
            return {}
        tip = head.tip
        tokens = tip.stop if session is None else common_prefix(tip.timeline()[0], session.token_ids)
        found = {Tier.DISK: self.disk.holding(tip, tokens)}
        found |= {sync.lower.tier: sync.holding(tip, tokens) for sync in self.syncs}
        return {tier: held for tier, held in found.items() if held.tokens}

    def flush(self, seconds: float) -> None:
        """Write everything that is not on disk yet, for at most ``seconds``."""
        until = time.monotonic() + seconds
        while self.write_behind.pending and time.monotonic() < until:
            self.write_behind.begin_writes(everything=True)
            time.sleep(0.002)
            self._background.poll()
            self.remover.begin()

    def close(self) -> None:
        """Finish the writes in progress and end the threads."""
        self._background.close()
        self.disk.segment_folder.close()

    def check_integrity(self) -> None:
        """Assert the invariants of the disk tier, and that no turn runs on a session that is being loaded."""
        self.disk.check_integrity()
        assert all(load.session.running for load in self._arriving)

    # -- up ---------------------------------------------------------------------------------------------------------

    def fetch(self, tenant: str, name: str | None, prompt: array[int], beside: str | None = None) -> Fetch | None:
        """Begin to load what is stored of ``prompt``, if that is more than memory holds and loading is faster than
        computing. None: there is nothing to load. ``beside``: a session that loses no KV for it, see ``acquire``.
        """
        owner = Owner(tenant, name, True) if name is not None else None
        if owner is None or self._store.find(tenant, owner.session) is not None:
            return self._find_fetch(tenant, name, owner, prompt, beside)
        if any(sync.awaits_download(owner) for sync in self.syncs):  # one after the other, nearest first
            return Fetch(begun=False)
        fetch = self._find_fetch(tenant, name, owner, prompt, beside)
        if (fetch is None or fetch.begun) and self.disk.has_damage(owner):
            fetch = fetch or Fetch(done=True)
            fetch.miss = fetch.miss or "damaged"
        return fetch

    def _find_fetch(
        self, tenant: str, name: str | None, owner: Owner | None, prompt: array[int], beside: str | None
    ) -> Fetch | None:
        head, shared = self._best_head(tenant, owner, prompt)
        if head is None:
            return None
        have = self._store.match(tenant, prompt, name)
        length = head.tip.reach(min(shared, len(prompt) - 1), self._store.stateful)
        if length <= have:
            return None
        if any(self.session_remover.concerns(segment.owner) for segment in head.tip.chain()):
            return Fetch(begun=False)
        if (under_way := self._fetches.get(head.owner)) is not None:
            return under_way if under_way.length >= length or under_way.stuck else Fetch(begun=False)
        if len(self._fetches) >= _LOADS:
            stuck = all(fetch.stuck for fetch in self._fetches.values())
            return Fetch(done=True, miss="recompute_cheaper") if stuck else Fetch(begun=False)
        extents = [extent for extent in head.tip.extents(length) if extent.stop > have]
        nbytes = sum(s.nbytes * (stop - first) // max(1, len(s.tokens)) for s, first, stop in extents)
        pictured = prompt[max(have, MARKED) : length]
        shown = any(token >= MEDIA for token in pictured)  # an encoder would have to run again
        if not shown and not self.restore_rates.prefers_loading(nbytes, length - have):
            return Fetch(done=True, miss="recompute_cheaper")
        return self._fetch(head, length, beside)

    def _best_head(self, tenant: str, owner: Owner | None, prompt: array[int]) -> tuple[ChainHead | None, int]:
        """The stored session with the longest common prefix with ``prompt``, and that prefix's length."""
        long = self._store.is_long(len(prompt))
        head, shared = self.disk.match(tenant, prompt, long)
        own = self.disk.head(owner) if owner is not None else None
        if own is not None and own.tip.private and own.tip.long is long:
            in_common = uncut(prompt, common_prefix(own.tip.timeline()[0], prompt))
            if in_common > shared:
                return own, in_common
        return head, shared

    def _fetch(self, head: ChainHead, length: int, beside: str | None) -> Fetch:
        """Reserve pages and begin to read the rest of the timeline into them."""
        owner, tip = head.owner, head.tip
        (ids, mask), aside = tip.timeline(length), beside is not None
        acquired = self._store.acquire(
            owner.tenant, None, ids + array("i", [0]), long=tip.long, parent=beside, aside=aside
        )
        if acquired is None:
            return Fetch(begun=False, room=False)
        fetch = self._fetches[owner] = Fetch(length=length, have=acquired.reused, source=head.source)
        head.source = Tier.DISK
        acquired.session.private = tip.private
        extents = [extent for extent in tip.extents(length) if extent.stop > fetch.have]
        pieces = [
            SegmentRange(self.disk.folder / s.folder, s.name, s.first, first, stop, s.after)
            for s, first, stop in extents
        ]
        self.disk.hold(tip)
        self.disk.touch(head)

        def finish(load: SegmentLoad) -> None:
            del self._fetches[owner]
            if load.broken is None:
                self.restore_rates.record_load(load.nbytes, load.seconds)
            else:
                fetch.miss = "damaged"
                if load.is_damaged:
                    self.disk.mark_damaged(extents[load.broken].segment)
            self._finish_load(load, ids, mask, tip, owner)
            self.disk.release(tip)
            fetch.tokens, fetch.seconds, fetch.done = load.tokens, load.seconds, True

        fetch.load = SegmentLoad(acquired.session, pieces, fetch.have, length, self._skeleton)
        self._arriving[fetch.load] = owner
        self.loader.start(fetch.load, finish)
        return fetch

    def _finish_load(
        self, load: SegmentLoad, ids: array[int], mask: bytearray, tip: Segment | None, owner: Owner
    ) -> None:
        """Make the session of a finished load idle, under its own name if that is free; drop it if it was forgotten
        meanwhile.
        """
        session = load.session
        if self._arriving.pop(load, None) is None:
            load.tokens = 0
            self._store.discard(session)
            return
        segment_loader.apply_load(load, ids, mask)
        if load.tokens and tip is not None:
            session.saved, session.saved_length = tip.at(session.length), session.length
        stop = self._stops.get(owner)
        if stop is not None and session.length >= stop.asked - self._store.pool.page_size:
            session.stop = stop
        if owner.named:
            self._store.name(session, owner.session)
        head = self.disk.head(owner)
        if head is not None:
            session.pinned_until = max(session.pinned_until, head.pinned_until)
        self._store.release(session)

    def take(self, owner: Owner, folder: Path, fingerprint: str, callback: Callable[[int, str | None], None]) -> None:
        """Import: load the files of an ``export`` in ``folder`` as the KV of a session, which is not shared with
        others. ``callback`` gets the number of tokens that are cached, and the reason if that is not all.
        """

        ticket = object()
        self._taking[ticket] = owner

        def on_found(outcome: Segment | Exception) -> None:
            if self._taking.pop(ticket, None) is None:  # forgotten meanwhile
                return callback(0, None)
            if isinstance(outcome, Exception):
                return callback(0, outcome.reason if isinstance(outcome, CorruptFile) else "unreadable")
            ids, mask = outcome.timeline()
            acquired = self._store.acquire(owner.tenant, None, ids + array("i", [0]), reuse=False, long=outcome.long)
            if acquired is None:
                return callback(0, "no_room")
            acquired.session.private = True
            pieces = [
                SegmentRange(folder, s.name, s.first, first, stop, s.after) for s, first, stop in outcome.extents()
            ]

            def finish(load: SegmentLoad) -> None:
                self._finish_load(load, ids, mask, None, owner)
                callback(load.tokens, None if load.broken is None else "damaged")

            load = SegmentLoad(acquired.session, pieces, 0, len(ids), self._skeleton)
            self._arriving[load] = owner
            return self.loader.start(load, finish)

        self._writer.submit(lambda: segment_loader.read_chain(folder, fingerprint), on_found)

    # -- down -------------------------------------------------------------------------------------------------------

    def forget(self, owner: Owner, callback: Callable[[], None]) -> None:
        """Remove what the tiers hold of a session. ``callback`` is called when the files are gone, and never if one
        cannot be unlinked.
        """
        self._arriving = {load: whose for load, whose in self._arriving.items() if whose != owner}
        self._taking = {ticket: whose for ticket, whose in self._taking.items() if whose != owner}
        self.session_remover.remove(owner, callback)

    def pin(self, owner: Owner, until: float) -> None:
        """Pin a session's files until ``until`` (Unix seconds): they are evicted last."""
        head = self.disk.head(owner)
        if head is not None:
            head.pinned_until = until

    def export(
        self, owner: Owner, session: SessionCache | None, ids: array[int] | None, folder: Path, callback: ExportCallback
    ) -> None:
        """Write what is stored of a session's timeline ``ids`` (None: whatever is stored) to a new ``folder`` as
        000000.kv, 000001.kv...; ``callback`` gets the number of files and of the tokens in them. A fork on which no
        turn has run has no files of its own: then the files of the tenant's other sessions with which it shares tokens
        are used.
        """
        tip = self._newest_segment(session)
        if tip is None and (head := self.disk.head(owner)) is not None:
            tip = head.tip
        if ids is not None and _shared_length(tip, ids) < len(ids) - 1:  # the last token of a reply is not fed
            tip = max(tip, *self._relatives(owner.tenant, ids), key=lambda end: _shared_length(end, ids))
        if tip is None:
            return callback(0, 0)
        length = tip.stop if ids is None else _shared_length(tip, ids)
        length = tip.reach(length, self._store.stateful)
        extents = tip.extents(length)
        self.disk.hold(tip)

        def on_copied(outcome: int | Exception) -> None:
            self.disk.release(tip)
            callback(*((0, 0) if isinstance(outcome, Exception) else (outcome, length)))

        self._writer.submit(lambda: export_segments(self.disk.folder, extents, owner, folder), on_copied)
        return None

    def _newest_segment(self, session: SessionCache | None) -> Segment | None:
        """The newest segment of a session in memory; an idle session's unsaved tokens are scheduled to be written
        first.
        """
        if session is not None and not session.running:
            self.write_behind.write_now(session)
        return None if session is None else session.saved

    def _relatives(self, tenant: str, ids: array[int]) -> tuple[Segment | None, Segment | None]:
        """The newest segments of the other sessions with the longest common prefix with ``ids``: one in memory, one on
        disk.
        """
        head, _ = self.disk.match(tenant, ids, self._store.is_long(len(ids)))
        return self._newest_segment(self._store.nearest(tenant, ids)), None if head is None else head.tip

    def _segment_written(self, written: SessionCache, segment: Segment) -> None:
        """Called when a segment of ``written`` is complete; its name may belong to another session by now."""
        owner = segment.owner
        if written.stop is not None:
            self._stops.pop(owner, None)
            self._stops[owner] = written.stop
            if len(self._stops) > _STOPS:
                self._stops.popitem(last=False)
        session = self._store.find(owner.tenant, owner.session) if owner.named else written
        head = self.disk.head(owner)
        if session is not None and head is not None:
            head.pinned_until = max(head.pinned_until, session.pinned_until)
        for sync in self.syncs if owner.named else ():
            sync.upload(segment)


def _shared_length(tip: Segment | None, ids: array[int]) -> int:
    return 0 if tip is None else common_prefix(tip.timeline()[0], ids)
