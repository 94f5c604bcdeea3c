"""What a log of format 1 does not say, filled in. Its rows are turns, and where their replies begin is not known."""

from __future__ import annotations

import json

import sqlalchemy as sql

from scheduler.messages import unpack_ids
from server.stored import columns_of
from server.tables import sessions, turns
from server.timeline import Row, Timeline, turns_within


def fill_in(connection: sql.Connection) -> None:
    """Complete the rows of every session, and what ``sessions`` tells of them."""
    for session in connection.execute(sql.select(sessions)).all():
        timeline, used = Timeline(), session.created
        rows = connection.execute(
            sql.select(turns).where(turns.c.session_id == session.id).order_by(turns.c.number)
        ).all()
        for old in rows:
            ids, messages = unpack_ids(old.tokens), json.loads(old.messages)
            end, used = old.keep_tokens + len(ids), old.created
            row = Row(
                "turn",
                old.created,
                old.fingerprint,
                turns_within(timeline.turns, old.keep_tokens, old.keep_messages),
                old.keep_tokens,
                ids,
                old.keep_messages,
                messages,
                end,
                0,
                old.finish_reason,
            )
            timeline.apply(row)
            columns = columns_of(session.tenant, session.session, session.id, timeline.number, row)
            connection.execute(
                sql.update(turns).where(turns.c.session_id == session.id, turns.c.number == old.number).values(columns)
            )
        connection.execute(
            sql.update(sessions)
            .where(sessions.c.id == session.id)
            .values(
                used=used,
                fingerprint=timeline.fingerprint,
                rows=timeline.number,
                turns=len(timeline.turns),
                tokens=len(timeline.tokens),
                messages=len(timeline.messages),
            )
        )
