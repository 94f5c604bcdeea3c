"""Vectors of sessions, for a search by meaning: one of each session, of the model that was asked last."""

from __future__ import annotations

import time
from collections.abc import Sequence

import sqlalchemy as sql

from server.log.log_thread import LogThread
from server.log.session_rows import find_session
from server.log.stored import is_unexpired
from server.log.tables import session_vectors, sessions

MOST = 10_000  # sessions of a tenant that are searched, those used last


class SessionVectors:
    """The vectors of sessions; they are deleted with their session. All of them can be made anew. Methods raise what
    those of ``SessionLog`` raise.
    """

    def __init__(self, thread: LogThread) -> None:
        self._thread = thread

    async def missing(self, tenant: str, model: str, limit: int) -> Sequence[tuple[str, int]]:
        """Up to ``limit`` sessions, those used last first, that have no vector of this model, or have changed since;
        each with what ``put`` is to be told of it.
        """
        there = sql.exists().where(
            session_vectors.c.session_id == sessions.c.id,
            session_vectors.c.model == model,
            session_vectors.c.rows == sessions.c.rows,
        )
        query = sql.select(sessions.c.session, sessions.c.rows).where(*mine(tenant), ~there)
        query = query.order_by(sessions.c.used.desc()).limit(limit)
        return await self._thread.read(
            lambda connection: [(row.session, row.rows) for row in connection.execute(query)]
        )

    async def put(self, tenant: str, session: str, rows: int, model: str, vector: bytes) -> None:
        """Keep a vector (float32; empty: nothing was said) in place of an earlier one, unless the session is gone."""

        def work(connection: sql.Connection) -> None:
            row = find_session(connection, tenant, session, time.time(), lock=True)
            if row is None:
                return
            connection.execute(sql.delete(session_vectors).where(session_vectors.c.session_id == row.id))
            values = {"session_id": row.id, "model": model, "rows": rows, "vector": vector}
            connection.execute(sql.insert(session_vectors).values(**values))

        await self._thread.write(work)

    async def of(self, tenant: str, model: str) -> Sequence[tuple[str, bytes]]:
        """The sessions that have a vector of this model, also of an earlier state of theirs."""
        query = sql.select(sessions.c.session, session_vectors.c.vector).join_from(session_vectors, sessions)
        query = query.where(
            *mine(tenant), session_vectors.c.model == model, sql.func.length(session_vectors.c.vector) > 0
        )
        query = query.order_by(sessions.c.used.desc()).limit(MOST)
        return await self._thread.read(
            lambda connection: [(row.session, row.vector) for row in connection.execute(query)]
        )


def mine(tenant: str) -> tuple[sql.ColumnElement[bool], ...]:
    """SQL conditions: a session of this tenant that has not expired."""
    return sessions.c.tenant == tenant, is_unexpired(time.time())
