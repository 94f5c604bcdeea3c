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
    """Claims and leases. Leases are taken and let go on the log's thread, between its other work."""

    def __init__(self, leases: Leases, thread: LogThread) -> None:
        self._claims = Claims()
        self._leases = leases
        self._thread = thread

    async def close(self) -> None:
        """Finish what was begun, and free what is still held."""
        await self._thread.close()
        await asyncio.to_thread(self._leases.end)

    @asynccontextmanager
    async def holding(self, tenant: str, session: str) -> AsyncIterator[None]:
        """Hold the session for one turn or change. Raises SessionBusy if anything in this process holds it or waits
        for it, or another server holds it and lives. It is waited for as long as that is not certain."""
        with ExitStack() as stack:
            await self.hold(tenant, session, stack)
            yield

    async def hold(self, tenant: str, session: str, stack: ExitStack) -> None:
        """The same until ``stack`` is closed."""
        stack.enter_context(self.claim(tenant, session))
        await self._lease((tenant, session), stack)

    @contextmanager
    def claim(self, tenant: str, session: str) -> Iterator[None]:
        """Hold the session against everything else in this process only. Raises SessionBusy."""
        with self._claims.claim((tenant, session)):
            yield

    @asynccontextmanager
    async def claim_when_free(self, tenant: str, session: str, seconds: float) -> AsyncIterator[bool]:
        """Hold the session once what holds it in this process is over, to end it; nothing new gets in between. Another
        server loses it: whether there was one. Raises SessionBusy if that takes longer than ``seconds``."""
        async with self._claims.claim_when_free((tenant, session), seconds):
            with ExitStack() as stack:
                yield await self._lease((tenant, session), stack, force=True)

    def is_held(self, tenant: str, session: str) -> bool:
        """Whether anything in this process holds the session."""
        return (tenant, session) in self._claims.held()

    def end_of_hold(self, tenant: str, session: str) -> asyncio.Event | None:
        """What is set when whatever in this process holds the session now is over; None where nothing does."""
        return self._claims.end_of((tenant, session))

    @property
    def shared(self) -> bool:
        """Whether other servers may use this log too: then ``beat`` every ``leases.BEAT_SECONDS``."""
        return self._leases.shared

    async def beat(self) -> LeaseChanges:
        """Tell the other servers that this one lives, and hear what they did to the sessions that it holds."""
        return await self._leases.beat()

    async def _lease(self, key: Key, stack: ExitStack, force: bool = False) -> bool:
        if not self._leases.shared:
            return False
        # Also where the wait is cut off while the lease is being taken.
        stack.callback(self._thread.submit, partial(self._leases.let_go, key))
        return await self._leases.take(key, self._thread, force=force)
