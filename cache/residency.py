"""``Residency``: which sessions are in device and host memory, and which of them leave when a turn needs room."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, islice

from cache.pages import near_ends
from cache.pages.eviction import TenantShares, eviction_order
from cache.pages.pool import Page, PagePool, near_parts
from cache.pages.retention import Retention, Stop
from cache.pages.session import SessionCache
from cache.tier import Tier
from cache.tiers.archive import Archive

_NEARLY_FULL = 16  # a device with less than one in so many pages free
_DEMOTE_EVERY = 0.25  # seconds between two sessions that are demoted ahead of need


class Residency:
    """The sessions in memory: *running* (a turn owns it), *warm* (idle, KV on the device) or *hosted* (idle, KV in host
    memory).

    Eviction moves a warm session to the host, and drops a hosted session if the host is full: the one that is worth
    least, see ``Retention``. A page leaves the device only when no warm session holds it, so pages that sessions share
    are moved once, with their last warm holder.
    """

    def __init__(
        self,
        pool: PagePool,
        retention: Retention,
        state_budget: int | None,
        share: float,
        discard: Callable[[SessionCache], None],
    ) -> None:
        """``state_budget`` and ``share``: see ``SessionStore``. ``discard``: drops a session that is evicted from
        memory.
        """
        self.archive: Archive | None = None
        self.evictions: Counter[Tier] = Counter()  # by the tier that sessions had to leave
        self.warm: OrderedDict[SessionCache, None] = OrderedDict()  # idle, least recently used first
        self.hosted: OrderedDict[SessionCache, None] = OrderedDict()
        self.running: dict[SessionCache, None] = {}
        self._unreleased: dict[SessionCache, None] = {}  # warm ones that may hold near parts that they do not see
        self.state_total = 0  # bytes of the states of idle sessions
        self._state_bytes: dict[SessionCache, int] = {}
        self.state_budget = state_budget or 0
        self._stateful = state_budget is not None
        self._pool = pool
        self._retention = retention
        self._discard = discard
        self._shares = TenantShares(share, pool.device.slots)  # warm sessions' pages, shared ones counted for each
        self._demote_at = 0.0  # of the retention's clock

    def __len__(self) -> int:
        return len(self.warm) + len(self.hosted) + len(self.running)

    def __iter__(self) -> Iterator[SessionCache]:
        return chain(self.warm, self.hosted, self.running)

    def __contains__(self, session: SessionCache) -> bool:
        return session in self.running or session in self.warm or session in self.hosted

    def start(self, session: SessionCache) -> None:
        """Idle or new -> running: it is not evicted from now on."""
        self._take(session)
        if not session.warm:
            self._pool.hold_warm(session.pages)
        session.running = session.warm = True
        self.running[session] = None
        self.count(session)

    def keep(self, session: SessionCache) -> None:
        """Running -> idle, most recently used. A session with pages on the host goes back to the host."""
        self.running.pop(session, None)
        session.running = False
        if self.archive is not None:
            self.archive.write_behind.schedule(session)
        if self._pool.off_device(session.pages):
            self._move_to_host(session)
        else:
            self.warm[session] = None
            if self._pool.windows is not None:
                self._unreleased[session] = None
        if self._stateful:
            self._state_bytes[session] = session.state_bytes
            self.state_total += self._state_bytes[session]
            if self.archive is None:
                self.trim()

    def remove(self, session: SessionCache) -> None:
        """Drop the pages of a session, idle or running."""
        self._take(session)
        self.running.pop(session, None)
        near_ends.cut(self._pool, session, 0)
        self._pool.drop(session.pages, warm=session.warm)
        session.pages = []
        session.running = session.warm = False
        self.count(session)

    def count(self, session: SessionCache) -> None:
        """Update the tenant's share after the pages of ``session`` have changed, or it is no longer warm."""
        pages = self._slots_of(session) if session.warm else 0
        self._shares.add(session.tenant, pages - session.counted)
        session.counted = pages

    def make_room(self, pages: int, user: SessionCache | None = None, near: int | None = None) -> bool:
        """Free device slots for ``pages`` pages of ``user``, and for the near parts of ``near`` (None: of all of them):
        by releasing near parts that no session sees, then by evicting idle sessions. Those that ``user`` spares are the
        last, if they may leave at all. False, with nobody evicted, if that cannot be enough.
        """
        device = self._pool.device
        near = pages if near is None else near
        if device.fits(pages, near) or self._release_unseen(pages, near):
            return True
        spared: tuple[SessionCache, ...] = ()
        staying: tuple[SessionCache, ...] = ()
        if user is not None:
            spared, staying = user.spared, self._staying(user)
        most = sum(len(session.pages) for session in (*self.running, *staying))  # shared ones count more than once
        most += self.archive.write_behind.holds if self.archive is not None else 0
        beside = self._pool.windows is None and pages <= device.slots - most
        if not beside and not self._fits_beside(pages, near, staying):
            self._urge(staying)
            return False
        order: Iterator[SessionCache] = iter(())
        while not device.fits(pages, near):
            if not self._pool.stranded:
                session = None if self._shares.over else next(order, None)
                if session is None:
                    order = iter(self._eviction_order(self.warm, spared))
                    session = next(order, None)
                if session is None or session in staying:
                    return False  # until writes are done, or a turn ends
                self._demote(session)
            self._offload_stranded(spared)
        return True

    def spare_pages(self, stop: Stop | None) -> int:
        """Device slots that are free, or held by idle sessions that are not pinned and worth less than one with that
        ``stop``.
        """
        rate, now, wall = self._retention.rate, self._retention.clock(), time.time()
        least = rate(stop, now)
        idle = (session for session in self.warm if session.pinned_until <= wall)
        return self._pool.device.free + sum(session.counted for session in idle if rate(session.stop, now) < least)

    def demote_late(self) -> None:
        """While the device is nearly full and the host is not, move one session to the host that is likely to pause for
        longer: turns then find room without waiting for the copy. What windowed layers of running sessions do not see
        any more is written, for the same reason.
        """
        device, host = self._pool.device, self._pool.host
        if device.free * _NEARLY_FULL > device.slots:
            return
        self._store_unseen()
        if not host.free or self._pool.stranded:
            return
        now = self._retention.clock()
        if now < self._demote_at:
            return
        self._demote_at = now + _DEMOTE_EVERY
        session = next(iter(self._eviction_order(self.warm)), None)
        if session is None or session.pinned_until > time.time() or not self._retention.is_late(session.stop, now):
            return
        if not host.fits(len(session.pages), near_parts(session.pages)):
            return
        self._demote(session)
        self._offload_stranded()

    def trim(self) -> None:
        """Evict sessions until the states of idle sessions fit their budget, in the order of eviction; the newest only
        if it is the only one.
        """
        while self.state_total > self.state_budget:
            others = len(self.hosted) + len(self.warm) - 1  # a turn may be about to go on from the newest
            idle = islice(chain(self.hosted, self.warm), max(1, others))
            session = next(iter(self._eviction_order(idle)), None)
            if session is None:
                break  # until writes are done
            self.evictions[Tier.DEVICE] += 1
            self._lose(session)

    def check_integrity(self) -> None:
        """Assert the invariants that hold between steps: references, tiers and budgets are consistent."""
        holders: defaultdict[Page, list[SessionCache]] = defaultdict(list)
        writing = self.archive.held if self.archive is not None else Counter()
        near = Counter(writing) if self._pool.windows is not None else Counter()
        for page in writing:
            holders[page] = []
        for session in self:
            assert session.length <= len(session.token_ids)
            assert len(session.pages) * self._pool.page_size >= session.length
            assert session.running == (session in self.running)
            assert session.warm == (session not in self.hosted)
            assert session.counted == (self._slots_of(session) if session.warm else 0)
            for page in session.pages:
                holders[page].append(session)
            near.update(near_ends.held_pages(self._pool, session))
        for page, sessions in holders.items():
            assert page.refs == len(sessions) + writing[page], (page.refs, sessions)
            assert page.warm == sum(session.warm for session in sessions) + writing[page]
            assert page.tier is self._pool.device or not page.warm
            assert (page in self._pool.stranded) == (page.tier is self._pool.device and not page.warm)
            assert page.nears == near[page]
            assert (page.near >= 0) == (page.nears > 0)
        assert self._shares.held.total() == sum(session.counted for session in (*self.warm, *self.running))
        assert self.state_total == sum(self._state_bytes.values())
        if self.archive is not None:
            self.archive.check_integrity()
        for tier in (self._pool.device, self._pool.host):
            pages = [page for page in holders if page.tier is tier]
            held = {page.slot for page in pages}, {page.near for page in pages if page.near >= 0}
            assert len(held[0]) == len(pages) or not tier.frames.each[0]
            assert len(held[1]) == near_parts(pages)
            assert tier.used == tier.frames.count_used(held), (held, tier.used)

    def _take(self, session: SessionCache) -> None:
        """An idle session is idle no longer."""
        self.warm.pop(session, None)
        self._unreleased.pop(session, None)
        self.hosted.pop(session, None)
        self.state_total -= self._state_bytes.pop(session, 0)
        if self.archive is not None:
            self.archive.write_behind.unschedule(session)

    def _demote(self, session: SessionCache) -> None:
        del self.warm[session]
        self._unreleased.pop(session, None)
        self.evictions[Tier.DEVICE] += 1
        self._retention.count_eviction(session.stop)
        self._move_to_host(session)

    def _eviction_order(
        self, idle: Iterable[SessionCache], spared: Collection[SessionCache] = ()
    ) -> list[SessionCache]:
        """The sessions of ``idle`` to evict next; while writes make progress, none that is scheduled for writing."""
        write_behind = self.archive.write_behind if self.archive is not None else None
        if write_behind is not None and write_behind.working:
            idle = (session for session in idle if not write_behind.is_scheduled(session))
        rate, now = self._retention.rate, self._retention.clock()
        return eviction_order(idle, self._shares.over, lambda session: rate(session.stop, now), spared)

    def _staying(self, user: SessionCache) -> tuple[SessionCache, ...]:
        """Which of the warm sessions that ``user`` spares do not leave for it: while other turns run all of them, and
        for a turn ``aside`` those whose KV would be lost.
        """
        spared = tuple(session for session in user.spared if session in self.warm)
        if len(self.running) > 1:
            return spared
        host, pages = self._pool.host, [page for session in user.spared for page in session.pages]
        if not user.aside or host.frames.count_needed(len(pages), near_parts(pages)) <= host.slots:
            return ()  # on the host others go before them
        return tuple(one for one in spared if self.archive is None or not self.archive.write_behind.is_stored(one))

    def _urge(self, staying: Iterable[SessionCache]) -> None:
        """A turn aside waits until these are stored: begin to write them, once."""
        for session in staying:
            if self.archive is not None and session.urged != session.length:
                session.urged = session.length
                self.archive.write_behind.write_now(session)

    def _lose(self, session: SessionCache) -> None:
        """Drop an idle session that is evicted."""
        if session.stop is not None and not session.saved_length:
            self._retention.lose(session.stop)
        self._discard(session)

    def _slots_of(self, session: SessionCache) -> int:
        """Slots that the pages of ``session`` take, shared ones included."""
        near = len(session.pages) - session.released if self._pool.windows is not None else 0
        return self._pool.device.frames.count_needed(len(session.pages), near)

    def _fits_beside(self, pages: int, near: int, staying: Iterable[SessionCache] = ()) -> bool:
        """Whether the device would have room for ``pages`` and ``near`` beside running sessions, those that are
        ``staying``, and writes alone.
        """
        device = self._pool.device
        held = {page for session in (*self.running, *staying) for page in session.pages if page.tier is device}
        if self.archive is not None:
            held |= set(self.archive.held)
        slots = {page.slot for page in held}, {page.near for page in held if page.near >= 0}
        return device.frames.fits_beside(slots, pages, near)

    def _release_unseen(self, pages: int, near: int) -> bool:
        """Release near parts that no next token sees until the device has room for ``pages`` and ``near``. False if all
        of them were not enough. First go those that no repeated turn sees either, of idle sessions first.
        """
        if self._pool.windows is None:
            return False
        for all_unseen in (False, True):
            for session in chain(self._unreleased, self.running):
                self._release_near(session, all_unseen)
                self.count(session)
                if self._pool.device.fits(pages, near):
                    return True
        self._store_unseen()
        left = (one for one in self._unreleased if near_ends.holds_unseen(self._pool, one))
        self._unreleased = dict.fromkeys(left)
        return False

    def _store_unseen(self) -> None:
        """Write what running sessions' windowed layers do not see any more: it can be released then."""
        if self.archive is not None:
            for session in self.running:
                self.archive.write_behind.write_unseen(session)

    def _release_near(self, session: SessionCache, all_unseen: bool) -> None:
        stored = session.saved_length if self.archive is not None else session.length
        near_ends.release(self._pool, session, stored, all_unseen=all_unseen)

    def _move_to_host(self, session: SessionCache) -> None:
        """Warm -> hosted; its pages move later, see ``_offload_stranded``."""
        self._release_near(session, all_unseen=False)
        self._pool.release_warm(session.pages)
        session.move(self._pool.host.device)
        session.warm = False
        self.hosted[session] = None
        self.count(session)

    def _offload_stranded(self, spared: Collection[SessionCache] = ()) -> None:
        """Take stranded pages off the device: move them to the host, where hosted sessions are dropped as needed, those
        that are worth least first and the ``spared`` ones last.
        """
        host, stranded = self._pool.host, self._pool.stranded
        order: Iterator[SessionCache] = iter(())
        while not host.fits(len(stranded), near := near_parts(stranded)):
            # If it would not fit an empty host: spare the others.
            newest = host.frames.count_needed(len(stranded), near) > host.slots
            session = next(reversed(self.hosted)) if newest else next(order, None)
            if session is None:
                order = iter(self._host_order(spared))
                session = next(order)
            self._lose(session)
            self.evictions[Tier.HOST] += host.slots > 0
        self._pool.demote()

    def _host_order(self, spared: Collection[SessionCache]) -> list[SessionCache]:
        """The hosted sessions to drop next: those whose return is least likely, weighted with what a token of it costs
        to restore; last those that are ``spared``.
        """
        rate, now = self._retention.rate, self._retention.clock()
        rates = self.archive.restore_rates if self.archive is not None else None
        token_bytes = self._pool.device.token_bytes

        def worth(session: SessionCache) -> float:
            stored = session.saved_length / session.length if session.length else 0.0
            return rate(session.stop, now) * (rates.seconds_per_token(token_bytes, stored) if rates else 1.0)

        return eviction_order(self.hosted, (), worth, spared)
