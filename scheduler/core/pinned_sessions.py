"""``PinnedSessions``: brings pinned sessions back to the device after they had to leave it."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict

from cache.pages.session import SessionCache, common_prefix
from cache.segments.chain import ChainHead, Owner
from cache.store import SessionStore

_MOST = 64  # sessions that are watched; of more the oldest are forgotten
_LOOK = 1.0  # seconds between two looks


class PinnedSessions:
    """The sessions that a client has pinned. As long as a pin lasts, what had to leave the device comes back when there
    is room: free pages, or those of sessions that are not pinned and worth less, see ``Residency.spare_pages``. One
    session at a look, so that this costs turns little.
    """

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._watched: OrderedDict[Owner, SessionCache | None] = OrderedDict()  # the next one to bring back first
        self._loading: set[Owner] = set()  # from below memory
        self._look_at = 0.0

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, owner: Owner, session: SessionCache | None = None) -> None:
        """A session was pinned, or the turn of a pinned one has ended. ``session``: where its KV is, if known."""
        self._watched[owner] = session or self._watched.get(owner)
        while len(self._watched) > _MOST:
            self._loading.discard(self._watched.popitem(last=False)[0])

    def poll(self) -> None:
        """Bring back the next one that has left, and forget those whose pin is over."""
        now = self._store.retention.clock()
        if not self._watched or now < self._look_at:
            return
        self._look_at = now + _LOOK
        for owner, known in list(self._watched.items()):
            session, head = self._resident(owner, known), self._head(owner)
            holder = session or head
            if holder is None or holder.pinned_until <= time.time():
                del self._watched[owner]
                self._loading.discard(owner)
            elif session is None or not (session.warm or session.running):
                self._watched.move_to_end(owner)
                self._bring_back(owner, known, session, head)
                return
            else:
                self._watched[owner] = session
                self._store.retention.brought_back += owner in self._loading
                self._loading.discard(owner)

    def _bring_back(
        self, owner: Owner, known: SessionCache | None, session: SessionCache | None, head: ChainHead | None
    ) -> None:
        """Begin what has room now."""
        store = self._store
        if session is not None:
            store.warm_up(session, announced=False)
            return
        assert store.archive is not None
        assert head is not None
        name, ids = owner.session if owner.named else None, head.tip.timeline()[0] + array("i", [0])
        lacking = -(-(len(ids) - store.match(owner.tenant, ids, name)) // store.pool.page_size)
        if lacking > store.residency.spare_pages(None if known is None else known.stop):
            return
        fetch = store.archive.fetch(owner.tenant, name, ids)
        if fetch is not None and fetch.load is not None:
            self._loading.add(owner)

    def _resident(self, owner: Owner, known: SessionCache | None) -> SessionCache | None:
        """The session in memory. An anonymous one that was loaded again is another than the one that had left."""
        if owner.named:
            return self._store.find(owner.tenant, owner.session)
        if known is None or known in self._store.residency:
            return known
        found, ids = self._store.nearest(owner.tenant, known.cached), known.cached
        if found is None or common_prefix(found.cached, ids) + self._store.pool.page_size <= len(ids):
            return None
        self._store.keep(found, known.pinned_until)
        return found

    def _head(self, owner: Owner) -> ChainHead | None:
        """What is stored of it below memory."""
        return None if self._store.archive is None else self._store.archive.disk.head(owner)
