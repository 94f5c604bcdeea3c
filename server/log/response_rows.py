"""Stored responses: a table beside the rows of the sessions that they are turns of."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sqlalchemy as sql

from server.log.database import Database
from server.log.leases import Leases
from server.log.log_thread import LogThread
from server.log.session_rows import find_session, require_session
from server.log.stored import SessionRow
from server.log.tables import responses, retries, sessions, unfinished

UNFINISHED = ("queued", "in_progress")  # as of ``tables.unfinished``
LOST = {"code": "server_error", "message": "The server ended while it ran this response, or could not store its end."}


@dataclass(frozen=True)
class StoredResponse:
    """A stored response. ``key`` is unique within its session; ``row`` is that of its turn in the session's log, None
    while there is no turn. ``body`` is the response object, ``inputs`` a list of items, oldest first, both as JSON;
    ``events`` are those of its stream, see ``server.http.event_recording``.
    """

    key: str
    status: str
    created: int  # Unix seconds
    body: str
    inputs: str
    row: int | None = None
    events: bytes | None = None


@dataclass(frozen=True, slots=True)
class TurnExtras:
    """What is committed with a turn: its ``response``; new ``metadata`` for its session (None: unchanged); and for a
    session that begins with this turn, its TTL in seconds and the session and turn that it was forked from; with
    ``copies`` it begins with a copy of that session's turns up to there. ``media``: bytes of its messages' media, by
    their digest.
    """

    response: StoredResponse | None = None
    ttl: int | None = None
    parent: tuple[str, int] | None = None
    metadata: Mapping[str, str] | None = None
    copies: bool = False
    media: Mapping[str, bytes] = field(default_factory=dict)


def put(connection: sql.Connection, session: SessionRow, server: str, response: StoredResponse) -> None:
    """Insert or replace a response."""
    columns: dict[str, Any] = {
        "session_id": session.id,
        "key": response.key,
        "status": response.status,
        "server": server,
        "created": response.created,
        "row": response.row,
        "body": response.body,
        "inputs": response.inputs,
        "events": response.events,
    }
    columns["checksum"] = checksum(session.tenant, session.session, columns)
    here = sql.and_(responses.c.session_id == session.id, responses.c.key == response.key)
    if connection.execute(sql.update(responses).where(here).values(columns)).rowcount == 0:
        connection.execute(sql.insert(responses).values(columns))


def read(connection: sql.Connection, session: SessionRow, key: str) -> StoredResponse | None:
    """A response; None if there is none or if its row is damaged."""
    query = sql.select(responses).where(responses.c.session_id == session.id, responses.c.key == key)
    return response_of(session, connection.execute(query).one_or_none())


def response_of(session: SessionRow, row: sql.Row[Any] | None) -> StoredResponse | None:
    """The response in a row; None if the checksum does not match."""
    columns: dict[str, Any] = {} if row is None else dict(row._mapping)
    if row is None or checksum(session.tenant, session.session, columns) != columns["checksum"]:
        return None
    events = columns["events"]
    return StoredResponse(
        columns["key"],
        columns["status"],
        columns["created"],
        columns["body"],
        columns["inputs"],
        columns["row"],
        None if events is None else bytes(events),
    )


def checksum(tenant: str, session: str, columns: dict[str, Any]) -> bytes:
    """16 bytes over all columns of a row and its tenant and session; b"" for columns of wrong types."""
    try:
        texts = [str(columns[name]).encode() for name in ("body", "inputs")]
        texts.append(bytes(columns["events"] or b""))
        facts = [tenant, session, *(columns[name] for name in ("key", "status", "server", "created", "row"))]
        facts += map(len, texts)
        return hashlib.blake2b(json.dumps(facts).encode() + b"".join(texts), digest_size=16).digest()
    except (TypeError, ValueError):  # SQLite's columns can hold any type
        return b""


class FoundResponse(NamedTuple):
    """A response with its session. An unfinished one has a ``server``; ``runs``: whether that server still runs it."""

    row: SessionRow | None
    response: StoredResponse | None
    server: str | None = None
    runs: bool = False


class ResponseLog:
    """The responses of sessions. Methods raise what those of ``SessionLog`` raise.

    The server that runs a response holds its session from before the response is written until its end is written. So
    an unfinished response whose server does not hold the session, or is dead, is *lost*: it has failed.
    """

    def __init__(self, database: Database, server: str, leases: Leases, thread: LogThread) -> None:
        self._database = database
        self._server = server
        self._leases = leases
        self._thread = thread

    def fail_unfinished(self) -> None:
        """Mark as failed the responses that this server was running when it ended. Blocking."""
        self._fail(lambda connection: responses.c.server == self._server)

    async def fail_lost(self) -> None:
        """Mark lost responses of all servers as failed."""

        def lost(connection: sql.Connection) -> sql.ColumnElement[bool]:
            name = sessions.c.tenant + "/" + sessions.c.session  # as leases.name_of writes it
            return ~self._leases.held_by(connection, name, responses.c.server)

        await self._thread.run(lambda: self._fail(lost))

    def _fail(self, which: Callable[[sql.Connection], sql.ColumnElement[bool]]) -> None:
        """Unfinished responses that nobody runs, one after the other."""

        def find_unwanted(connection: sql.Connection) -> list[tuple[str, str, str]]:
            query = sql.select(sessions.c.tenant, sessions.c.session, responses.c.key)
            query = query.join(sessions, sessions.c.id == responses.c.session_id)
            query = query.where(unfinished, which(connection))
            return [(*row,) for row in connection.execute(query)]

        for tenant, session, key in self._database.read(find_unwanted):
            self._settle(tenant, session, key, unwanted=False)

    async def settle(self, tenant: str, session: str, key: str, *, unwanted: bool = False) -> StoredResponse | None:
        """The state of a response that does not run on this server; a lost one is marked as failed. With ``unwanted``,
        the server that runs it is asked to end it, which it sees at its next heartbeat. Returns None where ``get``
        does.
        """
        return await self._thread.run(lambda: self._settle(tenant, session, key, unwanted))

    def _settle(self, tenant: str, session: str, key: str, unwanted: bool) -> StoredResponse | None:
        def look(connection: sql.Connection, lock: bool = False) -> FoundResponse:
            row = find_session(connection, tenant, session, time.time(), lock=lock)
            response = None if row is None else read(connection, row, key)
            if row is None or response is None or response.status not in UNFINISHED:
                return FoundResponse(row, response)
            here = responses.c.session_id == row.id, responses.c.key == key
            server = connection.execute(sql.select(responses.c.server).where(*here)).scalar_one()
            return FoundResponse(
                row, response, server, self._leases.is_held_elsewhere(connection, (tenant, session), server)
            )

        def work(connection: sql.Connection) -> StoredResponse | None:
            row, response, server, runs = look(connection, lock=True)
            if row is None or response is None or server is None:
                return response
            if runs:
                if unwanted:
                    self._leases.request_end(connection, (tenant, session), key)
                return response
            self._leases.revoke(connection, (tenant, session), server)
            put(connection, row, self._server, as_failed(response))
            return as_failed(response)

        found = self._database.read(look)
        if found.server is None or (found.runs and not unwanted):
            return found.response
        return self._database.write(work)

    async def get(self, tenant: str, session: str, key: str) -> StoredResponse | None:
        """A response; None if it, or its session, is unknown."""

        def work(connection: sql.Connection) -> StoredResponse | None:
            row = find_session(connection, tenant, session, time.time())
            return None if row is None else read(connection, row, key)

        return await self._thread.read(work)

    async def put(self, tenant: str, session: str, response: StoredResponse) -> None:
        """Write a response that has no turn (yet). Raises UnknownSession, SessionMoved."""

        def work(connection: sql.Connection) -> None:
            row = require_session(find_session(connection, tenant, session, time.time(), lock=True))
            self._leases.check(connection, (tenant, session))
            put(connection, row, self._server, response)

        await self._thread.write(work)

    async def delete(self, tenant: str, session: str, key: str) -> int | None:
        """Delete a response. Returns how many its session has left; None if the response is unknown."""
        return await self._thread.write(lambda connection: delete(connection, tenant, session, key))

    async def count(self, tenant: str, session: str) -> int:
        def work(connection: sql.Connection) -> int:
            row = find_session(connection, tenant, session, time.time())
            return 0 if row is None else count(connection, row)

        return await self._thread.read(work)

    async def of_key(self, tenant: str, session: str, key: str) -> tuple[str, StoredResponse | None] | None:
        """What an idempotency key has made in a session: the hash of the request, and the response unless it was
        deleted; None if the key is unknown.
        """

        def work(connection: sql.Connection) -> tuple[str, StoredResponse | None] | None:
            row = find_session(connection, tenant, session, time.time())
            if row is None:
                return None
            of_key = sql.select(retries).where(retries.c.session_id == row.id, retries.c.key == key)
            kept = connection.execute(of_key).one_or_none()
            if kept is None:
                return None
            of_row = sql.select(responses).where(responses.c.session_id == row.id, responses.c.row == kept.number)
            return kept.request_hash, response_of(row, connection.execute(of_row).one_or_none())

        return await self._thread.read(work)


def count(connection: sql.Connection, session: SessionRow) -> int:
    query = sql.select(sql.func.count()).select_from(responses).where(responses.c.session_id == session.id)
    return int(connection.execute(query).scalar_one())


def delete(connection: sql.Connection, tenant: str, session: str, key: str) -> int | None:
    """Delete a row. Returns how many its session has left; None if the row or the session is unknown."""
    row = find_session(connection, tenant, session, time.time(), lock=True)
    if row is None:
        return None
    this = responses.c.session_id == row.id, responses.c.key == key
    return count(connection, row) if connection.execute(sql.delete(responses).where(*this)).rowcount else None


def as_failed(response: StoredResponse) -> StoredResponse:
    """A lost response, with the status ``failed``."""
    body = {**json.loads(response.body), "status": "failed", "error": LOST}
    return StoredResponse(
        response.key,
        "failed",
        response.created,
        json.dumps(body, ensure_ascii=False, separators=(",", ":")),
        response.inputs,
    )
