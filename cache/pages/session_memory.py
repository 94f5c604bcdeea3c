"""``SessionMemory``: the interface of the session store (``cache.store``) that the tiers below memory
(``cache.tiers.archive``) use.
"""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple, Protocol

from cache.pages.pool import PagePool
from cache.pages.retention import Retention, Stop
from cache.pages.session import SessionCache


class Acquired(NamedTuple):
    """A session that is ready for a turn: ``reused`` tokens of the prompt are cached, ``restored`` of these came from
    the host tier.
    """

    session: SessionCache
    reused: int
    restored: int


class StateBudget(Protocol):
    """Keeps the states of idle sessions within their budget; see ``cache.residency.Residency``."""

    def trim(self) -> None: ...


class SessionMemory(Protocol):
    """The session caches in device and host memory; ``cache.store.SessionStore`` documents the methods.

    ``stateful``: the model keeps states that are not paged. ``skeleton``: any state of the model, as the structure for
    restoring others.
    """

    pool: PagePool
    retention: Retention
    stateful: bool
    skeleton: Any

    @property
    def residency(self) -> StateBudget: ...

    def find(self, tenant: str, name: str) -> SessionCache | None: ...

    def match(self, tenant: str, prompt: array[int], name: str | None = None) -> int: ...

    def nearest(self, tenant: str, ids: array[int]) -> SessionCache | None: ...

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
    ) -> Acquired | None: ...

    def name(self, session: SessionCache, name: str) -> None: ...

    def release(self, session: SessionCache, stop: Stop | None = None) -> None: ...

    def discard(self, session: SessionCache) -> None: ...

    def is_long(self, length: int) -> bool: ...
