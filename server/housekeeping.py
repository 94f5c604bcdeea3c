"""Background work on sessions: expiry, telling the engine about deleted and pinned sessions, heartbeats."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from server.engine.engine import Engine
from server.log.claims import Key
from server.log.database import LogFull, LogUnavailable
from server.log.leases import BEAT_SECONDS
from server.log.session_log import SessionLog
from server.log.timeline import SessionMoved

logger = logging.getLogger("warmturn.sessions")

SWEEP_SECONDS = 30.0
AGAIN_SECONDS = 600.0  # until an engine that has not answered is told again: its remote tier may have failed


class Housekeeper:
    """Keeps the engine up to date with the log. A deleted session leaves a tombstone in the log until the engine has
    confirmed that no tier holds any of its KV, whichever process restarts meanwhile. A tombstone belongs to one life of
    a session id: if the id is used again and deleted again, the engine is told again. Each server of a shared log has
    its own tombstones. Also writes this server's heartbeats.

    ``ready`` and ``forgotten`` are callbacks of the engine; they return at once. Work that fails is repeated by a later
    sweep or at the engine's next start, so an unavailable log only delays it.
    """

    def __init__(
        self, engine: Engine, log: SessionLog, unwanted: Callable[[str, str, str], object] = lambda *of: None
    ) -> None:
        """``unwanted`` is called with tenant, session and key of a response that another server was asked to cancel."""
        self._engine = engine
        self._log = log
        self._unwanted = unwanted
        self._tasks: set[asyncio.Task[None]] = set()
        self._told: dict[Key, tuple[int, float]] = {}  # the lives that this engine knows to be over, and since when

    async def run(self) -> None:
        """Sweep every 30 seconds until cancelled."""
        while True:
            await self._tolerant(self.sweep())
            await asyncio.sleep(SWEEP_SECONDS)

    async def live(self) -> None:
        """Write a heartbeat every two seconds until cancelled, if other servers share the log."""
        while self._log.shared:
            try:
                await self.beat()
            except LogUnavailable:
                pass  # the sweeps tell of that, and nothing can be committed meanwhile
            except Exception:
                logger.exception("a heartbeat failed")  # the next one may not: without any, sessions are taken away
            await asyncio.sleep(BEAT_SECONDS)

    async def sweep(self) -> None:
        """Delete expired sessions, send tombstones to the engine, and mark responses of dead servers as failed. Raises
        LogUnavailable.
        """
        await self._log.expire(time.time())
        await self._bury()
        if self._log.shared:
            await self._log.responses.fail_lost()
        with suppress(LogFull):  # that is known; whether it is over is looked at here too
            await self._log.writable()

    async def beat(self) -> None:
        """Write one heartbeat, and react to what the other servers did. Raises LogUnavailable."""
        news = await self._log.beat()
        for response in news.unwanted:
            self._unwanted(*response)
        stones = await self._log.tombstones() if news.lost else {}
        for key in news.lost:  # its turn ends: it could not be committed
            if key in stones:
                self._forget(key, stones[key])
            else:
                self._engine.end(*key, SessionMoved())

    def ready(self) -> None:
        """Tell a new engine which sessions were deleted while there was none, and which are pinned."""
        self._start(self._tell())

    def forgotten(self, tenant: str, session: str, life: int) -> None:
        """The engine holds no KV of this life of a session in any tier: remove the tombstone."""
        self._start(self._log.swept(tenant, session, life))

    async def close(self) -> None:
        """Cancel the tasks that were started."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _tell(self) -> None:
        self._told.clear()
        await self._bury()
        for tenant, session, until in await self._log.find_pinned(time.time()):
            self._engine.pin(tenant, session, until)

    async def _bury(self) -> None:
        stones, now = await self._log.tombstones(), time.monotonic()
        self._told = {key: told for key, told in self._told.items() if key in stones and now - told[1] < AGAIN_SECONDS}
        for key, life in stones.items():
            told = self._told.get(key)
            # One that was begun anew and has a turn now: forgetting would end it. Later.
            if (told is None or told[0] != life) and not self._log.is_held(*key):
                self._forget(key, life)

    def _forget(self, key: Key, life: int) -> None:
        self._told[key] = life, time.monotonic()
        self._engine.forget(*key, life)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._tolerant(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tolerant(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except LogUnavailable as error:
            logger.warning("housekeeping of the session log failed: %s", error.message)
