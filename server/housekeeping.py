"""What is done for sessions while nobody asks: their time runs out, and the engine hears of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from server.engine import Engine
from server.leases import BEAT_SECONDS
from server.log import LogUnavailable, SessionLog

logger = logging.getLogger("warmturn.sessions")

SWEEP_SECONDS = 30.0


class Housekeeper:
    """Keeps engine and log of one mind. A deleted session leaves a tombstone in the log until the engine has said
    that nothing of it is left anywhere, however often either of them restarts in between. Each server of a database has
    tombstones of its own. And tells the other servers of the log that this one lives.

    ``ready`` and ``forgotten`` are the engine's callbacks; they return at once. All is tried again at the next sweep
    or the next start of the engine, so a log that cannot be used now costs time only.
    """

    def __init__(
        self, engine: Engine, log: SessionLog, unwanted: Callable[[str, str], object] = lambda tenant, session: None
    ) -> None:
        """``unwanted`` is called for a session whose turn here is to end: another server was asked to cancel it."""
        self._engine = engine
        self._log = log
        self._unwanted = unwanted
        self._tasks: set[asyncio.Task[None]] = set()
        self._told: set[tuple[str, str]] = set()  # the tombstones that this engine knows of

    async def run(self) -> None:
        """Sweep every 30 seconds until cancelled."""
        while True:
            await self._tolerant(self.sweep())
            await asyncio.sleep(SWEEP_SECONDS)

    async def live(self) -> None:
        """Beat every two seconds until cancelled, where there are others to hear it."""
        while self._log.shared:
            try:
                await self.beat()
            except LogUnavailable:
                pass  # the sweeps tell of that, and nothing can be committed meanwhile
            except Exception:
                logger.exception("a heartbeat failed")  # the next one may not: without any, sessions are taken away
            await asyncio.sleep(BEAT_SECONDS)

    async def sweep(self) -> None:
        """Delete the sessions whose time has run out, have the engine forget what any server has deleted, and tell of
        responses that their servers are dead. Raises LogUnavailable."""
        await self._log.expire(time.time())
        await self._bury()
        if self._log.shared:
            await self._log.responses.fail_lost()

    async def beat(self) -> None:
        """One heartbeat, and what is to be done about what the others did. Raises LogUnavailable."""
        news = await self._log.beat()
        for tenant, session in news.unwanted:
            self._unwanted(tenant, session)
        if news.lost:
            for tenant, session in news.lost & {*await self._log.tombstones()}:
                self._engine.forget(tenant, session)  # deleted elsewhere: its turn ends

    def ready(self) -> None:
        """A fresh engine knows neither what was deleted while there was none, nor what is pinned."""
        self._start(self._tell())

    def forgotten(self, tenant: str, session: str) -> None:
        """Nothing of a session is left in any tier."""
        self._told.discard((tenant, session))
        self._start(self._log.swept(tenant, session))

    async def close(self) -> None:
        """End what was begun."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _tell(self) -> None:
        self._told.clear()
        await self._bury()
        for tenant, session, until in await self._log.pinned(time.time()):
            self._engine.pin(tenant, session, until)

    async def _bury(self) -> None:
        for tenant, session in await self._log.tombstones():
            # One that was begun anew and has a turn now: forgetting would end it. Later.
            if (tenant, session) not in self._told and not self._log.is_held(tenant, session):
                self._told.add((tenant, session))
                self._engine.forget(tenant, session)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._tolerant(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tolerant(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except LogUnavailable as error:
            logger.warning("the session log could not be tidied: %s", error.message)
