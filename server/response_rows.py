"""Stored responses in their table, beside the rows of the session that they are a turn of."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sql

from server.database import Database
from server.leases import InThread, Leases
from server.session_rows import find, known
from server.stored import SessionRow
from server.tables import responses, retries, sessions

UNFINISHED = ("queued", "in_progress")
LOST = {"code": "server_error", "message": "The server ended while this response was running."}


@dataclass(frozen=True)
class StoredResponse:
    """A response as it is kept. ``key`` is its own within its session; ``row`` that of the turn in the session's log,
    None while there is no turn. ``body`` is the object, ``inputs`` a list of items, oldest first, both as JSON;
    ``events`` those of its stream, see ``server.recording``."""

    key: str
    status: str
    created: int  # Unix seconds
    body: str
    inputs: str
    row: int | None = None
    events: bytes | None = None


@dataclass(frozen=True)
class Beside:
    """What a turn brings along: its ``response``; other ``metadata`` for its session (None: as they are); and for a
    session that begins with it, seconds to live and the session and turn that it was forked from."""

    response: StoredResponse | None = None
    ttl: int | None = None
    parent: tuple[str, int] | None = None
    metadata: Mapping[str, str] | None = None


def put(connection: sql.Connection, session: SessionRow, server: str, response: StoredResponse) -> None:
    """Write a response, or what has become of it."""
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
    """A response; None if there is none, also where its row is damaged: it is right, or it is not there."""
    query = sql.select(responses).where(responses.c.session_id == session.id, responses.c.key == key)
    return response_of(session, connection.execute(query).one_or_none())


def response_of(session: SessionRow, row: sql.Row[Any] | None) -> StoredResponse | None:
    """A row as what it holds, if that is what was written."""
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
    """16 bytes over all that a row says, and whose it is; b"" for what no row could say."""
    try:
        texts = [str(columns[name]).encode() for name in ("body", "inputs")]
        texts.append(bytes(columns["events"] or b""))
        facts = [tenant, session, *(columns[name] for name in ("key", "status", "server", "created", "row"))]
        facts += map(len, texts)
        return hashlib.blake2b(json.dumps(facts).encode() + b"".join(texts), digest_size=16).digest()
    except (TypeError, ValueError):  # SQLite's columns can hold any type
        return b""


class ResponseLog:
    """The responses of sessions. The verbs raise what those of ``SessionLog`` raise."""

    def __init__(self, database: Database, server: str, leases: Leases, in_thread: InThread) -> None:
        self._database = database
        self._server = server
        self._leases = leases
        self._in_thread = in_thread

    def fail_unfinished(self) -> None:
        """What this server was running when it ended has failed. Blocking."""
        self._fail(lambda connection: responses.c.server == self._server)

    async def fail_lost(self) -> None:
        """What servers were running that are dead has failed."""
        await self._in_thread(lambda: self._fail(self._leases.dead))

    def _fail(self, servers: Callable[[sql.Connection], sql.ColumnElement[bool] | None]) -> None:
        """Unfinished responses of some servers have failed, and these write nothing of them any more."""

        def found(connection: sql.Connection) -> sql.ColumnElement[bool]:
            those = servers(connection)
            return sql.false() if those is None else sql.and_(those, responses.c.status.in_(UNFINISHED))

        def work(connection: sql.Connection) -> None:
            for row in connection.execute(sql.select(responses).where(found(connection))).all():
                of_session = sql.select(sessions).where(sessions.c.id == row.session_id).with_for_update()
                session = connection.execute(of_session).one_or_none()
                if session is None:  # deleted meanwhile
                    continue
                self._leases.revoke(connection, (session.tenant, session.session), row.server)
                response = read(connection, session, row.key)
                if response is not None and response.status in UNFINISHED:
                    put(connection, session, self._server, failed(response))

        if self._database.read(lambda c: c.execute(sql.select(sql.exists().where(found(c)))).scalar_one()):
            self._database.write(work)

    async def get(self, tenant: str, session: str, key: str) -> StoredResponse | None:
        """A response; None if it, or its session, is unknown."""

        def work(connection: sql.Connection) -> StoredResponse | None:
            row = find(connection, tenant, session, time.time())
            return None if row is None else read(connection, row, key)

        return await self._in_thread(lambda: self._database.read(work))

    async def put(self, tenant: str, session: str, response: StoredResponse) -> None:
        """Write a response that has no turn (yet). Raises UnknownSession, SessionMoved."""

        def work(connection: sql.Connection) -> None:
            row = known(find(connection, tenant, session, time.time(), lock=True))
            self._leases.check(connection, (tenant, session))
            put(connection, row, self._server, response)

        await self._in_thread(lambda: self._database.write(work))

    async def delete(self, tenant: str, session: str, key: str) -> int | None:
        """Remove a response; how many its session has left, None if it is unknown."""

        def work(connection: sql.Connection) -> int | None:
            row = find(connection, tenant, session, time.time(), lock=True)
            if row is None:
                return None
            of_session = responses.c.session_id == row.id
            if not connection.execute(sql.delete(responses).where(of_session, responses.c.key == key)).rowcount:
                return None
            left = sql.select(sql.func.count()).select_from(responses).where(of_session)
            return int(connection.execute(left).scalar_one())

        return await self._in_thread(lambda: self._database.write(work))

    async def of_key(self, tenant: str, session: str, key: str) -> tuple[str, StoredResponse | None] | None:
        """What an idempotency key has made in a session: the request's hash, and the response unless it was deleted;
        None where the key is unknown."""

        def work(connection: sql.Connection) -> tuple[str, StoredResponse | None] | None:
            row = find(connection, tenant, session, time.time())
            if row is None:
                return None
            of_key = sql.select(retries).where(retries.c.session_id == row.id, retries.c.key == key)
            kept = connection.execute(of_key).one_or_none()
            if kept is None:
                return None
            of_row = sql.select(responses).where(responses.c.session_id == row.id, responses.c.row == kept.number)
            return kept.request_hash, response_of(row, connection.execute(of_row).one_or_none())

        return await self._in_thread(lambda: self._database.read(work))


def failed(response: StoredResponse) -> StoredResponse:
    """A response whose server has ended."""
    body = {**json.loads(response.body), "status": "failed", "error": LOST}
    return StoredResponse(
        response.key,
        "failed",
        response.created,
        json.dumps(body, ensure_ascii=False, separators=(",", ":")),
        response.inputs,
    )
