"""Which models have written turns of a session: rows of ``labels`` whose keys are no JSON strings, so that metadata
cannot have them.
"""

from __future__ import annotations

import json

import sqlalchemy as sql

from server.log.tables import labels, sessions

MODEL = '["model", '  # how such keys begin
IS_METADATA = sql.func.substr(labels.c.key, 1, 1) == '"'  # and none of these


def note_model(connection: sql.Connection, session_id: int, model: str) -> None:
    """``model``, a name, has written a turn of a session."""
    key = json.dumps(["model", model])
    known = sql.select(labels.c.key).where(labels.c.session_id == session_id, labels.c.key == key)
    if model and connection.execute(known).first() is None:
        connection.execute(sql.insert(labels).values(session_id=session_id, key=key, value='""'))


def copy_models(connection: sql.Connection, source: int, to: int) -> None:
    """The session ``to``, which has no models, was forked from ``source``."""
    theirs = sql.and_(labels.c.session_id == source, sql.func.substr(labels.c.key, 1, len(MODEL)) == MODEL)
    rows = sql.select(sql.literal(to), labels.c.key, labels.c.value).where(theirs)
    connection.execute(sql.insert(labels).from_select(["session_id", "key", "value"], rows))


def has_model(model: str) -> sql.ColumnElement[bool]:
    """SQL condition: this model has written a turn of the session."""
    having = sql.select(labels.c.session_id).where(labels.c.key == json.dumps(["model", model]))
    return sessions.c.id.in_(having)
