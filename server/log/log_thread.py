"""``LogThread``: runs all blocking work of a session log, so that a server's writes have one order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

import sqlalchemy as sql

from server.log.database import Database

T = TypeVar("T")


class LogThread:
    """One thread for a database. Submitted work always runs to its end, also if its caller is cancelled: a client that
    disconnects must not interrupt a commit.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="session-log")

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._executor, work))

    async def read(self, work: Callable[[sql.Connection], T]) -> T:
        """Run ``work`` in a read transaction. Raises LogUnavailable."""
        return await self.run(lambda: self._database.read(work))

    async def write(self, work: Callable[[sql.Connection], T]) -> T:
        """Run ``work`` in a transaction. Raises what ``Database.write`` raises."""
        return await self.run(lambda: self._database.write(work))

    def submit(self, work: Callable[[], object]) -> None:
        """Queue ``work`` without waiting for it. Does nothing once the thread is closed."""
        with suppress(RuntimeError):
            self._executor.submit(work)

    async def close(self) -> None:
        """Finish the queued work."""
        await asyncio.to_thread(self._executor.shutdown)
