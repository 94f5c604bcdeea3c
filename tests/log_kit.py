"""Short ways to write and read a session log in tests."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec

from server.log.logged_message import LoggedMessage
from server.log.session_log import SessionLog
from server.log.tables import ANYONE
from server.log.timeline import NewTurn, SessionRecord, TurnRecord, locate

Where = Path | str


@asynccontextmanager
async def opened(where: Where, server: str = ANYONE) -> AsyncIterator[SessionLog]:
    """A log that is closed afterwards."""
    log = SessionLog(where, server=server)
    try:
        yield log
    finally:
        await log.close()


def with_log(where: Where, scenario: Callable[[SessionLog], Awaitable[object]]) -> None:
    """Run a scenario on a log that is opened before and closed after it."""

    async def run() -> None:
        async with opened(where) as log:
            await scenario(log)

    asyncio.run(run())


def user(text: str) -> LoggedMessage:
    return LoggedMessage("user", text)


def assistant(text: str) -> LoggedMessage:
    return LoggedMessage("assistant", text)


def as_logged(messages: Iterable[Mapping[str, Any]]) -> list[LoggedMessage]:
    """Messages of a request as the log holds them."""
    return msgspec.convert([*messages], list[LoggedMessage])


def texts(record: SessionRecord) -> list[str]:
    return [message.content for message in record.messages]


OPTIONS = ("idempotency", "extras", "expect")


async def turn(log: SessionLog, session: str, ask: str, reply: str, tenant: str = "a", **facts: Any) -> TurnRecord:
    """One more turn: a token per character, first the question's and then the reply's. ``facts`` are fields of NewTurn
    or options of ``commit``."""
    record = await log.get(tenant, session)
    before = [] if record is None else record.tokens
    said = [] if record is None else record.messages
    prompt = [*before, *map(ord, ask)]
    new = NewTurn(
        tokens=[*prompt, *map(ord, reply)],
        messages=[*said, user(ask), assistant(reply)],
        prompt_tokens=len(prompt),
        **{"fingerprint": "f1", "finish_reason": "stop", **{k: v for k, v in facts.items() if k not in OPTIONS}},
    )
    return await log.commit(tenant, session, new, **{k: v for k, v in facts.items() if k in OPTIONS})


async def three_turns(log: SessionLog, session: str = "s") -> None:
    """A session of 12 tokens whose replies end after 4, 8 and 12 of them."""
    for ask, reply in (("a", "bcd"), ("e", "fgh"), ("i", "jkl")):
        await turn(log, session, ask, reply)


async def read(log: SessionLog, session: str = "s", tenant: str = "a") -> SessionRecord:
    """The record of a session that is there; what it says of itself holds together."""
    record = await log.get(tenant, session)
    assert record is not None
    assert record.summary == await log.summary(tenant, session)
    assert len(record.tokens) == (record.turns[-1].tokens if record.turns else 0)
    assert record.rendered == (record.turns[-1].messages if record.turns else 0)
    assert [turn.number for turn in record.turns] == [*range(1, len(record.turns) + 1)]
    return record


def text(record: SessionRecord) -> str:
    """The tokens of sessions that ``turn`` made."""
    return "".join(map(chr, record.tokens))


async def rewind_to_token(log: SessionLog, tokens: int, session: str = "s") -> SessionRecord:
    """Rewind as a server does: the text of a reply that is cut is decoded by the caller."""
    record = await read(log, session)
    place = locate(record, tokens)
    cut = None if place.reply is None else text(record)[place.reply : place.tokens]
    reply = None if cut is None else LoggedMessage("assistant", cut)
    await log.rewind("a", session, tokens=tokens, reply=reply, expect=record.version)
    return await read(log, session)


def sqlite(path: Path, *statements: str) -> list[Any]:
    """Run statements on a log from outside; the rows of the last one."""
    rows: list[Any] = []
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            rows = connection.execute(statement).fetchall()
        connection.commit()
    return rows


def as_format_10(path: Path) -> None:
    """Take back what format 11 has brought."""
    sqlite(path, "DROP TABLE session_vectors", "UPDATE log_format SET version = 10")


def as_format_9(path: Path) -> None:
    """Take back what formats 10 and 11 have brought."""
    as_format_10(path)
    sqlite(path, "DROP TABLE shares", "UPDATE log_format SET version = 9")


def as_format_8(path: Path) -> None:
    """Take back what formats 9 to 11 have brought."""
    as_format_9(path)
    sqlite(path, "DROP TABLE key_usage", "UPDATE log_format SET version = 8")


def as_format_7(path: Path) -> None:
    """Take back what formats 8 to 11 have brought."""
    drops = (
        "TRIGGER message_texts_added",
        "TRIGGER message_texts_removed",
        "TABLE message_words",
        "TABLE message_texts",
    )
    as_format_8(path)
    sqlite(path, *(f"DROP {name}" for name in drops), "UPDATE log_format SET version = 7")


def as_format_4(path: Path) -> None:
    """Take back what formats 5 to 11 have brought."""
    as_format_7(path)
    sqlite(
        path,
        "DROP TABLE media_refs",
        "DROP TABLE media",
        "ALTER TABLE turns DROP COLUMN receipt",
        "DROP TABLE leases",
        "DROP TABLE heartbeats",
        "ALTER TABLE tombstones DROP COLUMN life",
        "DROP INDEX responses_running",
        "DROP INDEX responses_chats",
        "CREATE INDEX responses_unfinished ON responses (server, status, created)",
        "UPDATE log_format SET version = 4",
    )
