"""``SessionStore``: the session caches of all sessions in device and host memory, found by name or by prefix, and
evicted in the order of what they are worth keeping.
"""

from __future__ import annotations

from array import array
from typing import Any

from cache.media_ids import uncut
from cache.pages import near_ends
from cache.pages import state as states
from cache.pages.pool import PagePool, near_parts
from cache.pages.prefix import PrefixIndexes
from cache.pages.retention import Retention, Stop
from cache.pages.session import SessionCache
from cache.pages.session_memory import Acquired
from cache.residency import Residency
from cache.segments.chain import Owner
from cache.tier import StopKind
from cache.tiers.archive import Archive


class SessionRunning(Exception):
    """A turn of this session is running already."""


class SessionStore:
    """The session caches of all sessions, over one page pool.

    ``residency`` says in which memory a session is, and evicts idle ones. It is never an error: dropped KV is loaded
    from the ``archive``, if there is one, or computed again.
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
        self.residency = Residency(pool, self.retention, state_budget, share, self.discard)
        self.archive: Archive | None = None
        self.stateful = state_budget is not None
        self.skeleton: Any = None  # any state of this model, to restore others by
        self.threshold = threshold
        self._named: dict[tuple[str, str], SessionCache] = {}
        self.index: PrefixIndexes[SessionCache] = PrefixIndexes()

    def attach(self, archive: Archive | None) -> None:
        """Use the tiers below memory, if there are any."""
        self.archive = self.residency.archive = archive

    def busy(self, tenant: str, name: str) -> bool:
        session = self._named.get((tenant, name))
        return session is not None and session.running

    @property
    def is_still(self) -> bool:
        """Whether no turn, load or write is going on that could make room."""
        return not self.residency.running and (self.archive is None or not self.archive.busy)

    def find(self, tenant: str, name: str) -> SessionCache | None:
        return self._named.get((tenant, name))

    def match(self, tenant: str, prompt: array[int], name: str | None = None) -> int:
        """How many tokens of ``prompt`` could be reused from memory now, at most all but one: from the named session or
        any other of ``tenant``.
        """
        long = self.is_long(len(prompt))
        found, shared = self.index.match(tenant, long, prompt)
        reach = self._reach(found, min(shared, len(prompt) - 1)) if found is not None else 0
        named = self.find(tenant, name) if name is not None else None
        own = self._reach(named, named.reachable(prompt)) if named is not None and named.long is long else 0
        return max(reach, own)

    def nearest(self, tenant: str, ids: array[int]) -> SessionCache | None:
        """The session of ``tenant`` in memory whose shareable tokens have the longest common prefix with ``ids``."""
        return self.index.match(tenant, self.is_long(len(ids)), ids)[0]

    def acquire(
        self,
        tenant: str,
        name: str | None,
        prompt: array[int],
        reuse: bool = True,
        long: bool | None = None,
        side: bool = False,
        parent: str | None = None,
        aside: bool = False,
    ) -> Acquired | None:
        """The session on which ``prompt`` will run, with the longest cached prefix of it on the device and pages for
        the rest. None if the device has no room now. Raises ``SessionRunning``.

        ``prompt`` is the whole timeline. With a ``name`` the result has that name: it is the named session, rewound to
        the common prefix, or one that shares more with the prompt. An idle anonymous session is continued if all its
        cached tokens are a prefix of the prompt; else a new session is forked from the one with the longest prefix,
        copy-on-write. ``long``: the side of the RoPE threshold, if it is not the prompt's own.

        With ``side`` the session that it shares a prefix with is never continued but forked, and is not evicted for
        this one, now or later, unless there is nothing else and no other turn runs; so is the session of the name
        ``parent``. With ``aside`` these leave the device only if the host or the disk has their KV.
        """
        named = self._named.get((tenant, name)) if name is not None else None
        if named is not None and named.running:
            raise SessionRunning
        long = self.is_long(len(prompt)) if long is None else long
        session, reused = self._best(tenant, named, prompt, long, side) if reuse else (self._new(tenant, long), 0)
        session.aside = aside
        if parent is not None and (kept := self.find(tenant, parent)) is not None and kept is not session:
            session.spared += (kept,)
        known = session in self.residency
        self.residency.start(session)
        self._cut(session, reused)
        off_device = self.pool.off_device(session.pages)
        missing, near = self._missing_slots(session, len(prompt)), near_parts(off_device)
        if not self.residency.make_room(missing + len(off_device), session, missing + near):
            session.spared = ()
            self._keep(session) if known else self.discard(session)
            if reuse and self._may_be_scattered:
                return self.acquire(tenant, name, prompt, False, long, side, parent, aside)
            return None
        self.pool.promote(off_device)
        session.on_pages_moved()
        session.move(self.pool.device.device)
        session.continued = session.continued or (known and reused > 0)
        self._begin(session, prompt, long)
        if name is not None and named is not session:
            self._pass_name(named, session, name)
        return Acquired(session, reused, min(len(off_device) * self.pool.page_size, reused))

    def _pass_name(self, named: SessionCache | None, session: SessionCache, name: str) -> None:
        """Give ``session`` the name, and the pin, of the one that had it, which is discarded."""
        if named is not None:
            session.pinned_until = max(session.pinned_until, named.pinned_until)
            self.discard(named)
        self.name(session, name)

    def _begin(self, session: SessionCache, prompt: array[int], long: bool) -> None:
        """Give the session ``prompt`` as its timeline, and pages for it. A rewind goes back to what it has now."""
        session.checkpoint()
        session.token_ids = array("i", prompt)
        session.began, session.asked = session.length, len(prompt)
        self.reserve(session, len(prompt))
        self.index.put(session.tenant, long, session)

    def reserve(self, session: SessionCache, length: int) -> bool:
        """Reserve pages for ``length`` tokens in all, and make the next one writable. False if running turns hold all
        the memory.
        """
        missing = self._missing_slots(session, length)
        if missing <= 0:
            return True
        if not self.residency.make_room(missing, session):
            return False
        if self._shares_next(session):
            at = session.length // self.pool.page_size
            session.pages[at] = self.pool.unshare(session.pages[at])
            missing -= 1
        session.pages.extend(self.pool.alloc() for _ in range(missing))
        session.on_pages_moved()
        self.residency.count(session)
        return True

    def invalidate(self, session: SessionCache) -> None:
        """A step failed: drop all that this running session has cached."""
        self._cut(session, 0)

    def publish(self, session: SessionCache) -> None:
        """Put what a running session has cached so far in the prefix index."""
        self.index.put(session.tenant, session.long, session)

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
        self.index.remove(session.tenant, session.long, session)
        if session.name is not None and self._named.get((session.tenant, session.name)) is session:
            del self._named[session.tenant, session.name]
        self.residency.remove(session)

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

    def warm_up(self, session: SessionCache, announced: bool = True) -> bool:
        """Bring a session in memory to the device, if there is room beside sessions that are worth more. False if there
        is none now. ``announced``: it is expected soon; else it is worth what the end of its last turn says.
        """
        if session.running:
            return True
        session.stop = session.stop or self.retention.expect(session.tenant)
        if announced:
            self.retention.announce(session.stop)
        off_device = self.pool.off_device(session.pages)
        if off_device:
            near = near_parts(off_device)
            if self.pool.device.frames.count_needed(len(off_device), near) > self.residency.spare_pages(session.stop):
                return False
            self.residency.start(session)
            roomy = self.residency.make_room(len(off_device), near=near)
            if roomy:
                self.pool.promote(off_device)
                session.on_pages_moved()
                session.move(self.pool.device.device)
                self.retention.count_raised(announced)
            self._keep(session)
            return roomy
        return True

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
        own = self._reach(named, named.reachable(prompt)) if named is not None and named.long is long else 0
        found, shared = self.index.match(tenant, long, prompt)
        shared = self._reach(found, min(shared, len(prompt) - 1)) if found is not None else 0
        if named is not None and named.long is long and own >= shared:
            return named, own
        if found is None or shared <= 0:
            return self._new(tenant, long), 0
        whole = found.length == shared and not found.running
        if whole and found.name is None and not side:
            return found, shared
        return self._fork(found, shared, side), shared

    def _reach(self, session: SessionCache, length: int) -> int:
        """The longest length, at most ``length``, to which ``session`` can be rewound or forked and that lacks no keys
        that a windowed layer sees. It ends in no medium.
        """
        length, windows, size = session.reach(length), self.pool.windows, self.pool.page_size
        while windows is not None and not session.sees_all(length, windows, size):
            length = uncut(session.token_ids, session.seen_reach(length, windows, size))
        return length

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
        near_ends.hold_seen(self.pool, branch, of_none=True)
        if self.stateful:
            branch.state = states.clone(trunk.state if length == trunk.length else trunk.checkpoints[length])
            branch.checkpoints = {at: state for at, state in trunk.checkpoints.items() if at <= length}
        if side:
            is_left = trunk.stop is not None and (trunk.stop.returned or trunk.stop.kind is StopKind.SIDE)
            branch.spared = () if is_left else (trunk,)
            return branch
        if branch.continued:
            branch.stop = trunk.stop
        elif trunk.stop is not None:
            self.retention.refresh(trunk.stop)
        if trunk in self.residency.warm:
            self.residency.warm.move_to_end(trunk)
        return branch

    def _new(self, tenant: str, long: bool) -> SessionCache:
        session = SessionCache(tenant, None, self.stateful)
        session.long = long
        return session

    @property
    def _may_be_scattered(self) -> bool:
        """Whether a turn that finds no room on its own would have found it with other pages: those of a session that
        grew beside others can lie scattered over frames, of which the rest is of use for one part only.
        """
        writing = self.archive is not None and self.archive.write_behind.holds > 0
        return self.pool.windows is not None and not self.residency.running and not writing

    # -- changing ---------------------------------------------------------------------------------------------------

    def _keep(self, session: SessionCache) -> None:
        """Running -> idle. A session without KV is dropped."""
        if not session.length:
            self.discard(session)
            return
        if self.archive is not None:
            session.checkpoint()
        self.index.put(session.tenant, session.long, session)
        self.residency.keep(session)

    def _cut(self, session: SessionCache, length: int) -> None:
        """Rewind a running session to ``length`` tokens; pages behind it are dropped."""
        session.cut(length)
        keep = -(-length // self.pool.page_size)
        near_ends.cut(self.pool, session, keep)
        if len(session.pages) > keep:
            self.pool.drop(session.pages[keep:], warm=True)
            del session.pages[keep:]
            session.on_pages_moved()
        near_ends.hold_seen(self.pool, session)
        self.residency.count(session)

    def _missing_slots(self, session: SessionCache, length: int) -> int:
        """How many device slots ``session`` needs to grow to ``length`` tokens."""
        lacking = -(-length // self.pool.page_size) - len(session.pages)
        return max(lacking, 0) + self._shares_next(session)

    def _shares_next(self, session: SessionCache) -> bool:
        """Whether the page that the next token is written to is held by others too."""
        page, offset = divmod(session.length, self.pool.page_size)
        return offset > 0 and session.pages[page].refs > 1
