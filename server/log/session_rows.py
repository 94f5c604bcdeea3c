"""Reads and writes one session's rows: find, insert, update, delete. Functions run in the caller's transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sql

from server.log.leases import Leases
from server.log.media_rows import NO_MEDIA, drop_media, hold_media
from server.log.search_index import forget_texts, index_messages, index_title
from server.log.session_models import IS_METADATA
from server.log.stored import SessionRow, columns_of, label, summaries_of
from server.log.tables import (
    labels,
    responses,
    retries,
    servers,
    session_vectors,
    sessions,
    shares,
    tombstones,
    turns,
)
from server.log.timeline import Row, SessionExists, SessionSummary, Timeline, UnknownSession

# The statements of every turn are built once: that costs more than to run them.
OF_NAME = sql.select(sessions).where(
    sessions.c.tenant == sql.bindparam("of_tenant"), sessions.c.session == sql.bindparam("of_session")
)
OF_NAME_LOCKED = OF_NAME.with_for_update()
UPDATE = sql.update(sessions).where(sessions.c.id == sql.bindparam("row_id"))
ADD_ROW = sql.insert(turns)


def find_session(
    connection: sql.Connection, tenant: str, session: str, now: float | None = None, *, lock: bool = False
) -> SessionRow | None:
    """The session's row, unless it is expired at ``now``. ``lock``: lock the row until the end of the transaction."""
    names = {"of_tenant": tenant, "of_session": session}
    row = connection.execute(OF_NAME_LOCKED if lock else OF_NAME, names).one_or_none()
    return None if row is not None and now is not None and is_expired(row, now) else row


def require_session(row: SessionRow | None) -> SessionRow:
    """The row. Raises UnknownSession if it is None."""
    if row is None:
        raise UnknownSession
    return row


def is_expired(row: SessionRow, now: float) -> bool:
    return row.expires is not None and row.expires <= int(now)


def version_of(row: SessionRow) -> int:
    """The version of the log that a record is based on. Row ids are never used twice, so versions are unique."""
    return int(row.id) << 32 | int(row.rows)


def insert_session(connection: sql.Connection, tenant: str, session: str, now: float, **facts: Any) -> SessionRow:
    """Insert the row of a session with an empty timeline. ``facts`` are columns of ``sessions``."""
    values = {"tenant": tenant, "session": session, "created": int(now), "used": now, **facts}
    made = connection.execute(sql.insert(sessions).values(values)).inserted_primary_key
    assert made is not None
    return connection.execute(sql.select(sessions).where(sessions.c.id == made[0])).one()


def insert_with_rows(
    connection: sql.Connection,
    leases: Leases,
    tenant: str,
    session: str,
    metadata: Mapping[str, str],
    facts: Mapping[str, Any],
    rows: Sequence[Row],
    now: float,
    media: Mapping[str, bytes] = NO_MEDIA,
) -> SessionSummary:
    """Insert a session with all its rows. ``media``: bytes of its messages' media, by their digest. Raises
    SessionExists, SessionMoved.
    """
    there = find_session(connection, tenant, session, lock=True)
    leases.check(connection, (tenant, session))
    if there is not None:
        if not is_expired(there, now):
            raise SessionExists
        delete_session(connection, there)
    row = insert_session(connection, tenant, session, now, **facts)
    timeline = Timeline()
    columns = []
    for new in rows:
        timeline.apply(new)
        columns.append(columns_of(tenant, session, row.id, timeline.number, new))
    connection.execute(ADD_ROW, columns)
    for new in rows:
        hold_media(connection, row, new.messages, media)
    set_counts(connection, row, timeline, now)
    index_messages(connection, row.id, 0, timeline.messages)
    set_metadata(connection, row.id, metadata)
    return summary_now(connection, row.id, now)


def set_counts(connection: sql.Connection, row: SessionRow, timeline: Timeline, now: float) -> None:
    """Update the counts of a session's row after its timeline has changed."""
    values = {
        "used": now,
        "expires": None if row.ttl is None else int(now) + row.ttl,
        "fingerprint": timeline.fingerprint,
        "rows": timeline.number,
        "turns": len(timeline.turns),
        "tokens": len(timeline.tokens),
        "messages": len(timeline.messages),
    }
    connection.execute(UPDATE, {"row_id": row.id, **values})


def set_metadata(connection: sql.Connection, session_id: int, metadata: Mapping[str, str]) -> None:
    """Replace all metadata of a session."""
    connection.execute(sql.delete(labels).where(labels.c.session_id == session_id, IS_METADATA))
    if metadata:
        pairs = [{"session_id": session_id, **label(key, value)} for key, value in metadata.items()]
        connection.execute(sql.insert(labels), pairs)
    index_title(connection, session_id, metadata)


def summary_now(connection: sql.Connection, session_id: int, now: float) -> SessionSummary:
    """The session's summary, as of this transaction."""
    row = connection.execute(sql.select(sessions).where(sessions.c.id == session_id)).one()
    return summaries_of(connection, [row], now)[0]


def delete_session(connection: sql.Connection, row: SessionRow) -> None:
    """Delete a session with all its rows, and insert a tombstone for each server; a tombstone covers all lives of the
    id.
    """
    drop_media(connection, row)
    forget_texts(connection, row.id)
    for table in (session_vectors, shares, responses, retries, labels, turns):
        connection.execute(sql.delete(table).where(table.c.session_id == row.id))
    connection.execute(sql.delete(sessions).where(sessions.c.id == row.id))
    stone = sql.and_(tombstones.c.tenant == row.tenant, tombstones.c.session == row.session)
    connection.execute(sql.delete(tombstones).where(stone))
    stones = sql.select(servers.c.id, sql.literal(row.tenant), sql.literal(row.session), sql.literal(row.id))
    connection.execute(sql.insert(tombstones).from_select(["server", "tenant", "session", "life"], stones))
