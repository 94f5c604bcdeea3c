"""Idempotency keys: which row of a session a key belongs to. Functions run in the caller's transaction."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sql

from server.log.database import SessionDamaged
from server.log.logged_message import LoggedMessage
from server.log.stored import SessionRow, row_of
from server.log.tables import retries, turns
from server.log.timeline import SessionMoved


@dataclass(frozen=True)
class Idempotency:
    """A client's key for one request (255 characters at most), and a hash of that request (128)."""

    key: str
    request_hash: str


@dataclass(frozen=True)
class CommittedTurn:
    """What the answer to a repeated request needs of its committed turn. ``created`` is in Unix seconds."""

    request_hash: str
    reply: LoggedMessage
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached: int
    created: int


def remember_key(connection: sql.Connection, row: SessionRow, idempotency: Idempotency, now: float) -> None:
    """Store the key for the row that is about to be added. Raises SessionMoved if the key has a row already."""
    of_key = sql.select(retries.c.number).where(retries.c.session_id == row.id, retries.c.key == idempotency.key)
    if connection.execute(of_key).one_or_none() is not None:
        raise SessionMoved
    values = {"session_id": row.id, "key": idempotency.key, "request_hash": idempotency.request_hash}
    connection.execute(sql.insert(retries).values({**values, "number": row.rows + 1, "created": int(now)}))


def find_replay(connection: sql.Connection, row: SessionRow, key: str) -> CommittedTurn | None:
    """The turn of a key; None if there is none. Raises SessionDamaged."""
    kept = connection.execute(
        sql.select(retries).where(retries.c.session_id == row.id, retries.c.key == key)
    ).one_or_none()
    if kept is None:
        return None
    stored = connection.execute(
        sql.select(turns).where(turns.c.session_id == row.id, turns.c.number == kept.number)
    ).one_or_none()
    if stored is None:
        raise SessionDamaged("a row of the session log is missing")
    turn = row_of(row.tenant, row.session, dict(**stored._mapping))
    if turn.prompt_tokens is None or turn.created != kept.created:  # keys have no checksum
        raise SessionDamaged("an idempotency key of the session log is damaged")
    return CommittedTurn(
        kept.request_hash,
        turn.messages[-1],
        turn.finish_reason,
        turn.prompt_tokens,
        turn.keep_tokens + len(turn.tokens) - turn.prompt_tokens,
        turn.cached,
        turn.created,
    )
