"""Stored chats in the log: rows in the table of responses, written with their turns under keys of their own."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sql

from server.log.database import Database
from server.log.log_thread import LogThread
from server.log.response_rows import StoredResponse, delete, put, read, response_of
from server.log.session_rows import find_session
from server.log.stored import SessionRow, is_unexpired
from server.log.tables import CHAT_KEY, responses, sessions, stored_chats

ID = re.compile(r"chatcmpl-([A-Za-z0-9._:@-]{1,128})-([0-9a-f]{24})\Z")
STATUS = "stored"
AT_ONCE = 200  # rows that are looked through in one transaction for those that a filter lets pass

Place = tuple[int, int, int]  # in the list: when it was made, the row ids of its session and of its turn


@dataclass(frozen=True)
class StoredChat:
    """A stored chat. ``body`` is the chat completion with its ``metadata`` and its request's parameters, ``messages``
    are the request's messages, oldest first.
    """

    body: dict[str, Any]
    messages: list[dict[str, Any]]

    @classmethod
    def of(cls, stored: StoredResponse) -> StoredChat:
        return cls(json.loads(stored.body), json.loads(stored.inputs))


def parse_chat_id(id: str) -> tuple[str, str] | None:
    """Session and key of a chat's id; None for any other id."""
    found = ID.match(id)
    return (found[1], CHAT_KEY + found[2]) if found else None


def row_of(body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> StoredResponse:
    """A row for a chat completion that was made on a session."""
    key = CHAT_KEY + str(body["id"]).rpartition("-")[2]
    return StoredResponse(key, STATUS, int(body["created"]), text(body), text([*messages]))


def text(value: object) -> str:
    """``value`` as JSON without whitespace."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def find_chat(
    connection: sql.Connection, tenant: str, id: str, *, lock: bool = False
) -> tuple[SessionRow, StoredResponse] | None:
    """A chat with its session; None if it is unknown."""
    place = parse_chat_id(id)
    row = None if place is None else find_session(connection, tenant, place[0], time.time(), lock=lock)
    if place is None or row is None:
        return None
    stored = read(connection, row, place[1])
    return None if stored is None else (row, stored)


class ChatLog:
    """The stored chats of sessions. They disappear when their session is deleted or expires. Methods raise
    LogUnavailable.
    """

    def __init__(self, database: Database, server: str, thread: LogThread) -> None:
        self._database = database
        self._server = server
        self._thread = thread

    async def get(self, tenant: str, id: str) -> StoredChat | None:
        def work(connection: sql.Connection) -> StoredChat | None:
            found = find_chat(connection, tenant, id)
            return None if found is None else StoredChat.of(found[1])

        return await self._thread.read(work)

    async def update(self, tenant: str, id: str, metadata: Mapping[str, str]) -> StoredChat | None:
        """Replace a chat's metadata; that of its session does not change. None if the chat is unknown."""

        def work(connection: sql.Connection) -> StoredChat | None:
            found = find_chat(connection, tenant, id, lock=True)
            if found is None:
                return None
            row, stored = found
            changed = replace(stored, body=text({**json.loads(stored.body), "metadata": dict(metadata)}))
            put(connection, row, self._server, changed)
            return StoredChat.of(changed)

        return await self._thread.write(work)

    async def delete(self, tenant: str, id: str) -> int | None:
        """Delete a chat. Returns how many chats and responses its session has left; None if the chat is unknown."""
        place = parse_chat_id(id)
        if place is None:
            return None
        left = await self._thread.write(lambda connection: delete(connection, tenant, *place))
        if left is not None:
            await self._thread.run(self._database.wipe)
        return left

    async def page(
        self,
        tenant: str,
        *,
        limit: int,
        after: str | None,
        descending: bool,
        model: str | None,
        metadata: Mapping[str, str],
    ) -> tuple[list[StoredChat], bool] | None:
        """Up to ``limit`` chats after the chat ``after``, the oldest first unless ``descending``, and whether there are
        more. Only chats of ``model`` and with all of ``metadata``. None if ``after`` is unknown.
        """
        place: Place | None = None
        if after is not None:
            place = await self._place(tenant, after)
            if place is None:
                return None
        found: list[StoredChat] = []
        filtered = model is not None or bool(metadata)
        while len(found) <= limit:
            rows = await self._rows(tenant, place, descending, AT_ONCE if filtered else limit + 1)
            for place, chat in rows:  # noqa: B007 the last place is where the next look begins
                mine = chat is not None and model in (None, chat.body["model"])
                if chat is not None and mine and metadata.items() <= chat.body["metadata"].items():
                    found.append(chat)
            if len(rows) < (AT_ONCE if filtered else limit + 1):
                break
        return found[:limit], len(found) > limit

    async def _place(self, tenant: str, id: str) -> Place | None:
        """Where a chat stands in the list."""

        def work(connection: sql.Connection) -> Place | None:
            found = find_chat(connection, tenant, id)
            return None if found is None else (found[1].created, found[0].id, found[1].row or 0)

        return await self._thread.read(work)

    async def _rows(
        self, tenant: str, place: Place | None, descending: bool, limit: int
    ) -> list[tuple[Place, StoredChat | None]]:
        """The next rows behind a place; None for one that is damaged."""
        columns = responses.c.created, responses.c.session_id, responses.c.row
        query = sql.select(responses, sessions.c.tenant, sessions.c.session)
        query = query.join(sessions, sessions.c.id == responses.c.session_id)
        query = query.where(sessions.c.tenant == tenant, is_unexpired(time.time()), stored_chats)
        if place is not None:
            here, there = sql.tuple_(*columns), sql.tuple_(*map(sql.literal, place))
            query = query.where(here < there if descending else here > there)
        query = query.order_by(*(column.desc() if descending else column.asc() for column in columns)).limit(limit)

        def work(connection: sql.Connection) -> list[tuple[Place, StoredChat | None]]:
            found: list[tuple[Place, StoredChat | None]] = []
            for row in connection.execute(query):
                stored = response_of(row, row)
                chat = None if stored is None else StoredChat.of(stored)
                found.append(((row.created, row.session_id, row.row), chat))
            return found

        return await self._thread.read(work)
