"""Several servers' logs on one database, and short ways to make servers die for the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import sqlalchemy as sql
from log_kit import assistant, user

from server.log.session_log import SessionLog
from server.log.tables import heartbeats, leases
from server.log.timeline import NewTurn, SessionRecord, TurnRecord

S = ("a", "s")
NAMES = ("one", "two", "three", "four")


@asynccontextmanager
async def living(*logs: SessionLog, pause: float = 0.02) -> AsyncIterator[None]:
    """Have these servers' hearts beat."""

    async def beat(log: SessionLog) -> None:
        while True:
            await log.beat()
            await asyncio.sleep(pause)

    hearts = [asyncio.create_task(beat(log)) for log in logs]
    try:
        yield
    finally:
        for heart in hearts:
            heart.cancel()
            with suppress(asyncio.CancelledError):
                await heart


def dies(log: SessionLog, server: str) -> None:
    """By the clock of the database, it is long since this server lived."""
    done(log, sql.update(heartbeats).where(heartbeats.c.server == server).values(beat=heartbeats.c.beat - 1000.0))


def done(log: SessionLog, statement: sql.Executable) -> None:
    log._database.write(lambda connection: connection.execute(statement))


def rows(log: SessionLog) -> Sequence[Any]:
    return log._database.read(lambda connection: connection.execute(sql.select(leases).order_by(leases.c.id)).all())


def elsewhere(log: SessionLog) -> frozenset[tuple[str, str]]:
    """The sessions that other servers hold, which live."""
    return log._database.read(log._leases.held_by_others)


async def hold_once(log: SessionLog, session: str = "s") -> None:
    """A turn or change that writes nothing."""
    async with log.holding("a", session):
        pass


async def settled(log: SessionLog) -> None:
    """Until what was begun on the log's thread is over."""
    await log.summary("a", "none")


async def say(log: SessionLog, record: SessionRecord | None, ask: str, reply: str, session: str = "s") -> TurnRecord:
    """The turn that was made from ``record``: a token per character."""
    before = [] if record is None else record.tokens
    said = [] if record is None else record.messages
    return await log.commit(
        "a",
        session,
        NewTurn(
            tokens=[*before, *map(ord, ask + reply)],
            messages=[*said, user(ask), assistant(reply)],
            prompt_tokens=len(before) + len(ask),
            fingerprint="f1",
            finish_reason="stop",
        ),
        expect=0 if record is None else record.version,
    )
