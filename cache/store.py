"""``SessionStore``: the session caches of all sessions in device and host memory, found by name or by prefix, and
evicted in the order of what they are worth keeping.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, islice
from typing import Any

from cache.pages import state as states
from cache.pages.eviction import TenantShares, eviction_order
from cache.pages.pool import Page, PagePool
from cache.pages.prefix import PrefixIndexes
from cache.pages.retention import Retention, Stop
from cache.pages.session import SessionCache
from cache.pages.session_memory import Acquired
from cache.segments.chain import Owner
from cache.tier import Tier
from cache.tiers.archive import Archive

_NEARLY_FULL = 16  # a device with less than one in so many pages free
_DEMOTE_EVERY = 0.25  # seconds between two sessions that are demoted ahead of need


class SessionRunning(Exception):
    """A turn of this session is running already."""


class SessionStore:
    """The session caches of all sessions, over one page pool.

    A session is *running* (a turn owns it), *warm* (idle, KV on the device), *hosted* (idle, KV in host memory) or
    gone. Eviction moves a warm session to the host, and drops a hosted session if the host is full: the one that is
    worth least, see ``Retention``. It is never an error: dropped KV is loaded from the ``archive``, if there is one,
    or computed again.

    A page leaves the device only when no warm session holds it, so pages that sessions share are moved once, with their
    last warm holder.
    """

    def __init__(
        self,
        pool: PagePool,
        state_budget: int | None = None,
        threshold: int | None = None,
        share: float = 1.0,
        retention: Retention | None = None,
    ) -> None:
        """``state_budget``: bytes for the states of idle sessions if the model has states that are not paged; None if
        it has none. ``threshold``: timelines longer than that have different keys than shorter ones, and share nothing
        with them. ``share``: the sessions of a tenant that holds more than this share of the pages are evicted first.
        """
        self.pool = pool
        self.retention = retention or Retention()
        self.archive: Archive | None = None
        self._shares = TenantShares(share, pool.device.slots)  # warm sessions' pages, shared ones counted for each
        self.stateful = state_budget is not None
        self.skeleton: Any = None  # any state of this model, to restore others by
        self._state_budget = state_budget or 0
        self._state_bytes: dict[SessionCache, int] = {}  # of idle sessions
        self._state_total = 0
        self.threshold = threshold
        self.evictions: Counter[Tier] = Counter()  # by the tier that sessions had to leave
        self._warm: OrderedDict[SessionCache, None] = OrderedDict()  # idle, least recently used first
        self._hosted: OrderedDict[SessionCache, None] = OrderedDict()
        self._running: set[SessionCache] = set()
        self._demote_at = 0.0  # of the retention's clock
        self._named: dict[tuple[str, str], SessionCache] = {}
        self._index: PrefixIndexes[SessionCache] = PrefixIndexes()

    def __len__(self) -> int:
        return len(self._warm) + len(self._hosted) + len(self._running)

    def busy(self, tenant: str, name: str) -> bool:
        """Whether a turn of the named session is running."""
        session = self._named.get((tenant, name))
        return session is not None and session.running

    def find(self, tenant: str, name: str) -> SessionCache | None:
        """The named session in device or host memory, if there is one."""
        return self._named.get((tenant, name))

    def holds(self, session: SessionCache) -> bool:
        """Whether this session is in device or host memory."""
        return session in self._running or session in self._warm or session in self._hosted

    def match(self, tenant: str, prompt: array[int], name: str | None = None) -> int:
        """How many tokens of ``prompt`` could be reused from memory now, at most all but one: from the named session or
        any other of ``tenant``.
        """
        long = self.is_long(len(prompt))
        found, shared = self._index.match(tenant, long, prompt)
        reach = found.reach(min(shared, len(prompt) - 1)) if found is not None else 0
        named = self.find(tenant, name) if name is not None else None
        own = named.reach(named.reachable(prompt)) if named is not None and named.long is long else 0
        return max(reach, own)

    def nearest(self, tenant: str, ids: array[int]) -> SessionCache | None:
        """The session of ``tenant`` in memory whose shareable tokens have the longest common prefix with ``ids``."""
        return self._index.match(tenant, self.is_long(len(ids)), ids)[0]

    def closest(self, tenant: str, prompt: array[int]) -> tuple[int, int | None]:
        """The length of the longest prefix that ``prompt`` has in common with any cached or stored timeline of
        ``tenant``, and the token with which that timeline continues.
        """
        long = self.is_long(len(prompt))
        session, shared = self._index.match(tenant, long, prompt)
        ids = session.shareable if session is not None else array("i")
        if self.archive is not None:
            head, stored = self.archive.disk.match(tenant, prompt, long)
            if head is not None and stored > shared:
                shared, ids = stored, head.shareable
        return shared, ids[shared] if shared < len(ids) else None

    def acquire(
        self,
        tenant: str,
        name: str | None,
        prompt: array[int],
        reuse: bool = True,
        long: bool | None = None,
        side: bool = False,
        parent: str | None = None,
    ) -> Acquired | None:
        """The session on which ``prompt`` will run, with the longest cached prefix of it on the device and pages for
        the rest. None if the device has no room now. Raises ``SessionRunning``.

        ``prompt`` is the whole timeline. With a ``name`` the result has that name: it is the named session, rewound to
        the common prefix, or one that shares more with the prompt. An idle anonymous session is continued if all its
        cached tokens are a prefix of the prompt; else a new session is forked from the one with the longest prefix,
        copy-on-write. ``long``: the side of the RoPE threshold, if it is not the prompt's own.

        With ``side`` the session that it shares a prefix with is never continued but forked, and is not evicted for
        this one, now or later, unless there is nothing else and no other turn runs; so is the session of the name
        ``parent``.
        """
        named = self._named.get((tenant, name)) if name is not None else None
        if named is not None and named.running:
            raise SessionRunning
        long = self.is_long(len(prompt)) if long is None else long
        session, reused = self._best(tenant, named, prompt, long, side) if reuse else (self._new(tenant, long), 0)
        if parent is not None and (kept := self.find(tenant, parent)) is not None and kept is not session:
            session.spared += (kept,)
        known = session in self._warm or session in self._hosted
        self._start(session)
        self._cut(session, reused)
        off_device = self.pool.off_device(session.pages)
        if not self._make_room(len(off_device) + self._missing(session, len(prompt)), session.spared):
            session.spared = ()
            self._keep(session) if known else self.discard(session)
            return None
        self.pool.promote(off_device)
        session.moved()
        session.move(self.pool.device.device)
        session.checkpoint()
        session.token_ids = array("i", prompt)
        session.asked, session.continued = len(prompt), session.continued or (known and reused > 0)
        self.reserve(session, len(prompt))
        self._index.put(tenant, long, session)
        if name is not None and named is not session:
            if named is not None:
                session.pinned_until = max(session.pinned_until, named.pinned_until)
                self.discard(named)
            self.name(session, name)
        return Acquired(session, reused, min(len(off_device) * self.pool.page_size, reused))

    def reserve(self, session: SessionCache, length: int) -> bool:
        """Reserve pages for ``length`` tokens in all, and make the next one writable. False if running turns hold all
        the memory.
        """
        missing = self._missing(session, length)
        if missing <= 0:
            return True
        if not self._make_room(missing, session.spared):
            return False
        if self._shares_next(session):
            at = session.length // self.pool.page_size
            session.pages[at] = self.pool.unshare(session.pages[at])
            missing -= 1
        session.pages.extend(self.pool.alloc() for _ in range(missing))
        session.moved()
        self._count(session)
        return True

    def invalidate(self, session: SessionCache) -> None:
        """A step failed: drop all that this running session has cached."""
        self._cut(session, 0)

    def publish(self, session: SessionCache) -> None:
        """Put what a running session has cached so far in the prefix index."""
        self._index.put(session.tenant, session.long, session)

    def release(self, session: SessionCache, stop: Stop | None = None) -> None:
        """The session's turn is over: it is idle, most recently used, and may be evicted. ``stop``: the end of the
        turn; None: a turn is about to use it, unless it has a stop from elsewhere.
        """
        self._cut(session, session.length)
        session.stop = stop or session.stop or self.retention.expect(session.tenant)
        if stop is not None:
            stop.asked = session.asked
        session.spared = ()
        self._keep(session)

    def resume(self, session: SessionCache, at: float, ping: bool = False) -> tuple[Stop, float] | None:
        """A turn that came at ``at`` (of the retention's clock) has acquired ``session``: the stop from which it goes
        on, and the gap in seconds. None if it goes on from none, or is not the first. A ``ping`` is no continuation: it
        refreshes what it found.
        """
        stop, session.stop = session.stop, None
        if stop is None:
            return None
        if ping:
            self.retention.refresh(stop)
            return None
        gap = self.retention.resume(stop, at)
        return None if gap is None else (stop, gap)

    def discard(self, session: SessionCache) -> None:
        """Drop a session, idle or running, and its KV."""
        self._running.discard(session)
        self._warm.pop(session, None)
        self._hosted.pop(session, None)
        self._state_total -= self._state_bytes.pop(session, 0)
        if self.archive is not None:
            self.archive.write_behind.unschedule(session)
        self._index.remove(session.tenant, session.long, session)
        if session.name is not None and self._named.get((session.tenant, session.name)) is session:
            del self._named[session.tenant, session.name]
        self.pool.drop(session.pages, warm=session.warm)
        session.pages = []
        session.running = session.warm = False
        self._count(session)

    def name(self, session: SessionCache, name: str) -> None:
        """Give an anonymous session a name, unless that is taken."""
        if session.name is None and (session.tenant, name) not in self._named:
            session.name = name
            self._named[session.tenant, name] = session

    def pin(self, tenant: str, name: str, until: float) -> None:
        """Pin the named session in every tier until ``until`` (Unix seconds): it is evicted last."""
        session = self.find(tenant, name)
        if session is not None:
            session.pinned_until = until
        if self.archive is not None:
            self.archive.pin(Owner(tenant, name, True), until)

    def keep(self, session: SessionCache, until: float) -> None:
        """Pin this session in every tier until ``until`` (Unix seconds), unless it is pinned for longer."""
        if until > session.pinned_until:
            session.pinned_until = until
            if self.archive is not None:
                self.archive.pin(session.owner, until)

    def forget(self, tenant: str, name: str) -> None:
        """Drop the named session if it is in memory and idle."""
        session = self._named.get((tenant, name))
        if session is not None and not session.running:
            self.discard(session)

    def refresh(self, tenant: str, name: str) -> None:
        """The named session waits for another one that has just been used: its age counts from now."""
        session = self.find(tenant, name)
        if session is not None and session.stop is not None:
            self.retention.refresh(session.stop)

    def warm_up(self, session: SessionCache) -> bool:
        """Bring an announced session in memory to the device, if there is room beside sessions that are worth more.
        False if there is none now.
        """
        if session.running:
            return True
        session.stop = session.stop or self.retention.expect(session.tenant)
        self.retention.announce(session.stop)
        off_device = self.pool.off_device(session.pages)
        if off_device:
            if len(off_device) > self.spare_pages(session.tenant):
                return False
            self._start(session)
            roomy = self._make_room(len(off_device))
            if roomy:
                self.pool.promote(off_device)
                session.moved()
                session.move(self.pool.device.device)
                self.retention.warmed += 1
            self._keep(session)
            return roomy
        return True

    def spare_pages(self, tenant: str) -> int:
        """Device pages that are free, or held by idle sessions that are worth less than an announced one of
        ``tenant``.
        """
        now = self.retention.clock()
        least = self.retention.rate(self.retention.expect(tenant), now)
        spare = (len(session.pages) for session in self._warm if self.retention.rate(session.stop, now) < least)
        return self.pool.device.free + sum(spare)

    def demote_late(self) -> None:
        """While the device is nearly full and the host is not, move one session to the host that is likely to pause for
        longer: turns then find room without waiting for the copy.
        """
        device, host = self.pool.device, self.pool.host
        if not host.free or device.free * _NEARLY_FULL > device.slots or self.pool.stranded:
            return
        now = self.retention.clock()
        if now < self._demote_at:
            return
        self._demote_at = now + _DEMOTE_EVERY
        session = next(iter(self._eviction_order(self._warm)), None)
        if session is None or not self.retention.is_late(session.stop, now) or len(session.pages) > host.free:
            return
        self._demote(session)
        self._offload_stranded()

    def trim(self) -> None:
        """Evict sessions until the states of idle sessions fit their budget, in the order of eviction; the newest only
        if it is the only one.
        """
        while self._state_total > self._state_budget:
            others = len(self._hosted) + len(self._warm) - 1  # a turn may be about to go on from the newest
            idle = islice(chain(self._hosted, self._warm), max(1, others))
            session = next(iter(self._eviction_order(idle)), None)
            if session is None:
                break  # until writes are done
            self.evictions[Tier.DEVICE] += 1
            self._lose(session)

    def check_integrity(self) -> None:
        """Assert the invariants that hold between steps: references, tiers and budgets are consistent."""
        holders: defaultdict[Page, list[SessionCache]] = defaultdict(list)
        writing = self.archive.held if self.archive is not None else Counter()
        for page in writing:
            holders[page] = []
        for session in (*self._warm, *self._hosted, *self._running):
            assert session.length <= len(session.token_ids)
            assert len(session.pages) * self.pool.page_size >= session.length
            assert session.running == (session in self._running)
            assert session.warm == (session not in self._hosted)
            assert session.counted == len(session.pages) * session.warm
            for page in session.pages:
                holders[page].append(session)
        for page, sessions in holders.items():
            assert page.refs == len(sessions) + writing[page], (page.refs, sessions)
            assert page.warm == sum(session.warm for session in sessions) + writing[page]
            assert page.tier is self.pool.device or not page.warm
            assert (page in self.pool.stranded) == (page.tier is self.pool.device and not page.warm)
        assert self._shares.held.total() == sum(len(session.pages) for session in (*self._warm, *self._running))
        assert self._state_total == sum(self._state_bytes.values())
        if self.archive is not None:
            self.archive.check_integrity()
        for tier in (self.pool.device, self.pool.host):
            slots = [page.slot for page in holders if page.tier is tier]
            assert len(slots) == len(set(slots)) == tier.used, (len(slots), tier.used)

    # -- choosing ---------------------------------------------------------------------------------------------------

    def is_long(self, length: int) -> bool:
        """Whether a timeline of that many tokens is on the long side of the threshold."""
        return self.threshold is not None and length > self.threshold

    def _best(
        self, tenant: str, named: SessionCache | None, prompt: array[int], long: bool, side: bool = False
    ) -> tuple[SessionCache, int]:
        """The session to run on and how many of its tokens to keep; a fork if the session with the longest prefix must
        not change.
        """
        own = named.reach(named.reachable(prompt)) if named is not None and named.long is long else 0
        found, shared = self._index.match(tenant, long, prompt)
        shared = found.reach(min(shared, len(prompt) - 1)) if found is not None else 0
        if named is not None and named.long is long and own >= shared:
            return named, own
        if found is None or shared <= 0:
            return self._new(tenant, long), 0
        whole = found.length == shared and not found.running
        if whole and found.name is None and not side:
            return found, shared
        return self._fork(found, shared, side), shared

    def _fork(self, trunk: SessionCache, length: int, side: bool = False) -> SessionCache:
        """A new session that shares the first ``length`` tokens of ``trunk``, page by page."""
        branch = self._new(trunk.tenant, trunk.long)
        branch.token_ids = trunk.token_ids[:length]
        branch.mask = trunk.mask[:length]
        branch.pages = trunk.pages[: -(-length // self.pool.page_size)]
        branch.private = trunk.private
        # Templates write the end of a prompt differently once there is a reply; others with that beginning end before.
        branch.continued = not trunk.running and length >= trunk.asked - self.pool.page_size
        branch.saved, branch.saved_length = trunk.saved, trunk.saved_length
        branch.settle()
        self.pool.share(branch.pages)
        if self.stateful:
            branch.state = states.clone(trunk.state if length == trunk.length else trunk.checkpoints[length])
            branch.checkpoints = {at: state for at, state in trunk.checkpoints.items() if at <= length}
        if side:
            branch.spared = (trunk,)
            return branch
        if branch.continued:
            branch.stop = trunk.stop
        elif trunk.stop is not None:
            self.retention.refresh(trunk.stop)
        if trunk in self._warm:
            self._warm.move_to_end(trunk)
        return branch

    def _new(self, tenant: str, long: bool) -> SessionCache:
        session = SessionCache(tenant, None, self.stateful)
        session.long = long
        return session

    # -- moving -----------------------------------------------------------------------------------------------------

    def _start(self, session: SessionCache) -> None:
        """Idle or new -> running: it is not evicted from now on."""
        self._warm.pop(session, None)
        self._hosted.pop(session, None)
        self._state_total -= self._state_bytes.pop(session, 0)
        if self.archive is not None:
            self.archive.write_behind.unschedule(session)
        if not session.warm:
            self.pool.hold_warm(session.pages)
        session.running = session.warm = True
        self._running.add(session)
        self._count(session)

    def _keep(self, session: SessionCache) -> None:
        """Running -> idle. A session without KV is dropped; one with pages on the host goes back to the host."""
        if not session.length:
            self.discard(session)
            return
        self._running.discard(session)
        session.running = False
        if self.archive is not None:
            session.checkpoint()
            self.archive.write_behind.schedule(session)
        self._index.put(session.tenant, session.long, session)
        if self.pool.off_device(session.pages):
            self._move_to_host(session)
        else:
            self._warm[session] = None
        if self.stateful:
            self._state_bytes[session] = session.state_bytes
            self._state_total += self._state_bytes[session]
            if self.archive is None:
                self.trim()

    def _cut(self, session: SessionCache, length: int) -> None:
        """Rewind a running session to ``length`` tokens; pages behind it are dropped."""
        session.cut(length)
        keep = -(-length // self.pool.page_size)
        if len(session.pages) > keep:
            self.pool.drop(session.pages[keep:], warm=True)
            del session.pages[keep:]
            session.moved()
            self._count(session)

    def _missing(self, session: SessionCache, length: int) -> int:
        """How many device slots ``session`` needs to grow to ``length`` tokens."""
        lacking = -(-length // self.pool.page_size) - len(session.pages)
        return max(lacking, 0) + self._shares_next(session)

    def _shares_next(self, session: SessionCache) -> bool:
        """Whether the page that the next token is written to is held by others too."""
        page, offset = divmod(session.length, self.pool.page_size)
        return offset > 0 and session.pages[page].refs > 1

    def _make_room(self, pages: int, spared: Collection[SessionCache] = ()) -> bool:
        """Free ``pages`` device slots, evicting idle sessions as needed, those that are ``spared`` only if no other
        turn runs. False, with nobody evicted, if that cannot be enough.
        """
        device = self.pool.device
        if device.free >= pages:
            return True
        most = sum(len(session.pages) for session in self._running)  # counts shared pages more than once, and is quick
        most += self.archive.write_behind.holds if self.archive is not None else 0
        if pages > device.slots - most and pages > device.slots - self._held():
            return False
        order: Iterator[SessionCache] = iter(())
        while device.free < pages:
            if not self.pool.stranded:
                session = None if self._shares.over else next(order, None)
                if session is None:
                    order = iter(self._eviction_order(self._warm, spared))
                    session = next(order, None)
                if session is None or (session in spared and len(self._running) > 1):
                    return False  # until writes are done, or a turn ends
                self._demote(session)
            self._offload_stranded()
        return True

    def _demote(self, session: SessionCache) -> None:
        """Evict a warm session from the device."""
        del self._warm[session]
        self.evictions[Tier.DEVICE] += 1
        self.retention.count_eviction(session.stop)
        self._move_to_host(session)

    def _eviction_order(
        self, idle: Iterable[SessionCache], spared: Collection[SessionCache] = ()
    ) -> list[SessionCache]:
        """The sessions of ``idle`` to evict next; while writes make progress, none that is scheduled for writing."""
        write_behind = self.archive.write_behind if self.archive is not None else None
        if write_behind is not None and write_behind.working:
            idle = (session for session in idle if not write_behind.is_scheduled(session))
        rate, now = self.retention.rate, self.retention.clock()
        return eviction_order(idle, self._shares.over, lambda session: rate(session.stop, now), spared)

    def _lose(self, session: SessionCache) -> None:
        """Drop an idle session that is evicted."""
        if session.stop is not None and not session.saved_length:
            self.retention.lose(session.stop)
        self.discard(session)

    def _count(self, session: SessionCache) -> None:
        """Update the tenant's share after the pages of ``session`` have changed, or it is no longer warm."""
        pages = len(session.pages) if session.warm else 0
        self._shares.add(session.tenant, pages - session.counted)
        session.counted = pages

    def _held(self) -> int:
        """Device slots that running sessions hold, shared ones counted once."""
        held = {page for session in self._running for page in session.pages if page.tier is self.pool.device}
        return len(held | set(self.archive.held) if self.archive is not None else held)

    def _move_to_host(self, session: SessionCache) -> None:
        """Warm -> hosted; its pages move later, see ``_offload_stranded``."""
        self.pool.release_warm(session.pages)
        session.move(self.pool.host.device)
        session.warm = False
        self._hosted[session] = None
        self._count(session)

    def _offload_stranded(self) -> None:
        """Take stranded pages off the device: move them to the host, where hosted sessions are dropped as needed, least
        recently used first.
        """
        host, stranded = self.pool.host, self.pool.stranded
        order: Iterator[SessionCache] = iter(())
        while len(stranded) > host.free:
            newest = len(stranded) > host.slots  # it would not fit an empty host: spare the others
            session = next(reversed(self._hosted)) if newest else next(order, None)
            if session is None:
                order = iter(self._host_order())
                session = next(order)
            self._lose(session)
            self.evictions[Tier.HOST] += host.slots > 0
        self.pool.demote()

    def _host_order(self) -> list[SessionCache]:
        """The hosted sessions to drop next: those whose return is least likely, weighted with what a token of it costs
        to restore.
        """
        rate, now = self.retention.rate, self.retention.clock()
        rates = self.archive.restore_rates if self.archive is not None else None
        token_bytes = self.pool.device.token_bytes

        def worth(session: SessionCache) -> float:
            stored = session.saved_length / session.length if session.length else 0.0
            return rate(session.stop, now) * (rates.seconds_per_token(token_bytes, stored) if rates else 1.0)

        return eviction_order(self._hosted, (), worth)
