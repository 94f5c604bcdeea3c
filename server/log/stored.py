"""Conversion between values and columns: rows with checksums, metadata, session summaries."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sql

from scheduler.protocol import unpack_ids
from server.log.database import SessionDamaged
from server.log.logged_message import of_json, to_json
from server.log.search_index import first_texts
from server.log.session_models import IS_METADATA
from server.log.tables import labels, sessions
from server.log.timeline import Row, SessionSummary, title_of

SessionRow = sql.Row[Any]  # of the table sessions, all columns
METADATA = (
    sql.select(labels)
    .where(labels.c.session_id.in_(sql.bindparam("ids", expanding=True)), IS_METADATA)
    .order_by(labels.c.key)
)


def columns_of(tenant: str, session: str, session_id: int, number: int, row: Row) -> dict[str, Any]:
    """A row as the columns of ``turns``. Its checksum includes tenant, session and number, so it is invalid anywhere
    else.
    """
    columns = {
        "session_id": session_id,
        "number": number,
        "keep_tokens": row.keep_tokens,
        "tokens": row.tokens.tobytes(),
        "keep_messages": row.keep_messages,
        "messages": to_json(row.messages),
        "fingerprint": row.fingerprint,
        "finish_reason": row.finish_reason,
        "created": row.created,
        "kind": row.kind,
        "keep_turns": row.keep_turns,
        "prompt_tokens": row.prompt_tokens,
        "cached": row.cached,
        "receipt": row.receipt,
    }
    return {**columns, "checksum": checksum(tenant, session, columns)}


def row_of(tenant: str, session: str, columns: Mapping[str, Any]) -> Row:
    """The inverse of ``columns_of``. Raises SessionDamaged if the checksum does not match."""
    try:
        is_ours = checksum(tenant, session, columns) == columns["checksum"]
    except (TypeError, ValueError):  # SQLite's columns can hold any type
        is_ours = False
    if not is_ours:
        raise SessionDamaged("a row of the session log is damaged")
    try:
        messages = of_json(columns["messages"])
    except ValueError as error:
        raise SessionDamaged("a row of the session log holds what is no message") from error
    return Row(
        columns["kind"],
        columns["created"],
        columns["fingerprint"],
        columns["keep_turns"],
        columns["keep_tokens"],
        unpack_ids(columns["tokens"]),
        columns["keep_messages"],
        messages,
        columns["prompt_tokens"],
        columns["cached"],
        columns["finish_reason"],
        columns["receipt"],
    )


def checksum(tenant: str, session: str, columns: Mapping[str, Any]) -> bytes:
    """16 bytes over all columns of a row and its tenant and session."""
    tokens, messages = bytes(columns["tokens"]), str(columns["messages"]).encode()
    facts = [
        tenant,
        session,
        columns["number"],
        columns["kind"],
        columns["created"],
        columns["fingerprint"],
        columns["finish_reason"],
        columns["keep_turns"],
        columns["keep_tokens"],
        columns["keep_messages"],
        columns["prompt_tokens"],
        columns["cached"],
        len(tokens),
        *([] if columns["receipt"] is None else [columns["receipt"]]),  # rows of format 4 have none
    ]
    return hashlib.blake2b(json.dumps(facts).encode() + tokens + messages, digest_size=16).digest()


def metadata_of(connection: sql.Connection, ids: Iterable[int]) -> dict[int, dict[str, str]]:
    """The metadata of sessions, by row id, with an entry for each of ``ids``."""
    found: dict[int, dict[str, str]] = {id_: {} for id_ in ids}
    for label in connection.execute(METADATA, {"ids": [*found]}):
        found[label.session_id][json.loads(label.key)] = json.loads(label.value)
    return found


def label(key: str, value: str) -> dict[str, str]:
    """A pair of metadata as columns of ``labels``."""
    return {"key": json.dumps(key), "value": json.dumps(value)}


def is_unexpired(now: float) -> sql.ColumnElement[bool]:
    """SQL condition: the session is not past its TTL."""
    return sql.or_(sessions.c.expires.is_(None), sessions.c.expires > int(now))


def facts_of(row: SessionRow, metadata: dict[str, str], now: float) -> dict[str, Any]:
    """The fields that SessionSummary and SessionRecord share, without the counts."""
    pinned = row.pinned_until is not None and row.pinned_until > now
    return {
        "id": row.session,
        "created": row.created,
        "used": int(row.used),
        "fingerprint": row.fingerprint,
        "metadata": metadata,
        "ttl": row.ttl,
        "expires": row.expires,
        "pinned_until": row.pinned_until if pinned else None,
        "parent": None if row.parent is None else (row.parent, row.parent_turn),
    }


def summaries_of(connection: sql.Connection, rows: Sequence[SessionRow], now: float) -> list[SessionSummary]:
    """The summaries of sessions' rows."""
    ids = [row.id for row in rows]
    metadata, said = metadata_of(connection, ids), first_texts(connection, ids)
    return [
        SessionSummary(
            turns=row.turns,
            tokens=row.tokens,
            messages=row.messages,
            title=title_of(metadata[row.id], said.get(row.id, "")),
            **facts_of(row, metadata[row.id], now),
        )
        for row in rows
    ]
