"""``Prefetcher``: brings the KV of announced requests to the device before they come."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass

from cache.pages.eviction import scope_name
from cache.pages.session import SessionCache, common_prefix
from cache.segments.chain import Owner
from cache.store import SessionStore
from scheduler.protocol import Warm, unpack_ids

_MOST = 64  # announcements that wait for room; of more the oldest are dropped
_PATIENCE = 30.0  # seconds after which an announcement is dropped
_EVERY = 0.05  # seconds between two tries


@dataclass
class _Announcement:
    """``since``: by the retention's clock. ``loading``: KV is or was loaded for it from below memory."""

    since: float
    loading: bool = False


class Prefetcher:
    """Announced requests whose KV is not on the device yet. Those that come are loaded as usual if this is late.

    Nothing is evicted for an announcement but sessions that are worth less, see ``Residency.spare_pages``.
    """

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._waiting: OrderedDict[Warm, _Announcement] = OrderedDict()
        self._next = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Warm) -> None:
        self._waiting.setdefault(request, _Announcement(self._store.retention.clock()))
        while len(self._waiting) > _MOST:
            self._waiting.popitem(last=False)
        self._next = 0.0

    def poll(self) -> None:
        """Begin what has room now, and drop what is done or has waited for too long."""
        if not self._waiting:
            return
        now = self._store.retention.clock()
        if now < self._next:
            return
        self._next = now + _EVERY
        for request, announcement in list(self._waiting.items()):
            if self._bring_up(request, announcement) or now - announcement.since > _PATIENCE:
                del self._waiting[request]

    def _bring_up(self, request: Warm, announcement: _Announcement) -> bool:
        """Whether nothing is left to do for it."""
        store, tenant = self._store, scope_name(request.tenant, request.salt)
        ids = self._timeline(request, tenant)
        if not ids or (request.session is not None and store.busy(tenant, request.session)):
            return True
        if not self._is_loaded(request, announcement, tenant, ids + array("i", [0])):
            return False
        session = self._in_memory(request, tenant, ids)
        if session is None:
            return True
        store.keep(session, request.until)
        if not store.warm_up(session):
            return False
        store.retention.warmed += announcement.loading
        return True

    def _timeline(self, request: Warm, tenant: str) -> array[int]:
        """The tokens that the request will begin with."""
        if request.prompt or request.session is None:
            return unpack_ids(request.prompt)
        session = self._store.find(tenant, request.session)
        if session is not None:
            return session.cached
        archive = self._store.archive
        head = archive.disk.head(Owner(tenant, request.session, True)) if archive is not None else None
        return head.tip.timeline()[0] if head is not None else array("i")

    def _is_loaded(self, request: Warm, announcement: _Announcement, tenant: str, ids: array[int]) -> bool:
        """Whether memory has all that is worth loading from below it; begins to load it if there is room."""
        store = self._store
        if store.archive is None:
            return True
        if not announcement.loading:
            lacking = len(ids) - store.match(tenant, ids, request.session)
            spare = store.residency.spare_pages(store.retention.expect(tenant))
            if lacking > 1 and -(-lacking // store.pool.page_size) > spare:
                return False
        fetch = store.archive.fetch(tenant, request.session, ids)
        if fetch is None or fetch.done:
            return True
        announcement.loading |= fetch.begun
        return False

    def _in_memory(self, request: Warm, tenant: str, ids: array[int]) -> SessionCache | None:
        """The session that the request will go on from."""
        if request.session is not None:
            return self._store.find(tenant, request.session)
        session = self._store.nearest(tenant, ids)
        if session is None or common_prefix(session.cached, ids) < self._store.pool.page_size:
            return None
        return session
