"""Locks of sessions: a claim in this process and a lease among the servers of the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial

from server.log.claims import Claims, Key
from server.log.leases import LeaseChanges, Leases
from server.log.log_thread import LogThread


class SessionLocks:
    """Claims and leases of sessions. Leases are taken and released on the log's thread."""

    def __init__(self, leases: Leases, thread: LogThread) -> None:
        self._claims = Claims()
        self._leases = leases
        self._thread = thread

    async def close(self) -> None:
        """Finish queued work and release all leases."""
        await self._thread.close()
        await asyncio.to_thread(self._leases.end)

    @asynccontextmanager
    async def holding(self, tenant: str, session: str) -> AsyncIterator[None]:
        """Hold the session for one turn or change. Raises SessionBusy if this process has claimed it or waits for it,
        or if another live server holds it; waits until it is certain whether that server is alive.
        """
        with ExitStack() as stack:
            await self.hold(tenant, session, stack)
            yield

    async def hold(self, tenant: str, session: str, stack: ExitStack) -> None:
        """Like ``holding``, until ``stack`` is closed."""
        stack.enter_context(self.claim(tenant, session))
        await self._lease((tenant, session), stack)

    @contextmanager
    def claim(self, tenant: str, session: str) -> Iterator[None]:
        """Claim the session in this process only. Raises SessionBusy."""
        with self._claims.claim((tenant, session)):
            yield

    @asynccontextmanager
    async def claim_when_free(self, tenant: str, session: str, seconds: float) -> AsyncIterator[bool]:
        """Hold the session as soon as its current claim in this process ends, before any other caller, in order to
        delete it. Another server's lease is taken away; yields whether there was one. Raises SessionBusy after
        ``seconds``.
        """
        async with self._claims.claim_when_free((tenant, session), seconds):
            with ExitStack() as stack:
                yield await self._lease((tenant, session), stack, force=True)

    def is_held(self, tenant: str, session: str) -> bool:
        """Whether the session is claimed in this process."""
        return (tenant, session) in self._claims.claimed_keys()

    def end_of_hold(self, tenant: str, session: str) -> asyncio.Event | None:
        """An event that is set when the session's current claim in this process ends; None if there is none."""
        return self._claims.end_of((tenant, session))

    @property
    def shared(self) -> bool:
        """Whether other servers may use this log too. If so, call ``beat`` every ``leases.BEAT_SECONDS``."""
        return self._leases.shared

    async def beat(self) -> LeaseChanges:
        """Write a heartbeat. Returns what other servers did to the sessions that this one holds."""
        return await self._leases.beat()

    async def _lease(self, key: Key, stack: ExitStack, force: bool = False) -> bool:
        if not self._leases.shared:
            return False
        # Also where the wait is cut off while the lease is being taken.
        stack.callback(self._thread.submit, partial(self._leases.release, key))
        return await self._leases.take(key, self._thread, force=force)
