"""The tables of a log made, or brought from an older format to this one."""

from __future__ import annotations

import json

import sqlalchemy as sql

from scheduler.protocol import unpack_ids
from server.log.database import LogUnavailable
from server.log.stored import columns_of
from server.log.tables import (
    ANYONE,
    FORMAT,
    MIGRATION_LOCK,
    chats_index,
    damaged,
    log_format,
    metadata,
    responses,
    servers,
    sessions,
    tombstones,
    turns,
)
from server.log.timeline import Row, Timeline, turns_within


def prepare(connection: sql.Connection) -> None:
    """Make the tables of a new log, or bring those of an older one to this format; in the caller's transaction.
    Raises LogUnavailable for a log of a later version, and where the names are taken by what is no log; LogDamaged."""
    if connection.dialect.name == "postgresql":
        connection.execute(sql.select(sql.func.pg_advisory_xact_lock(MIGRATION_LOCK)))
    if not sql.inspect(connection).has_table(log_format.name):
        taken = metadata.tables.keys() & {*sql.inspect(connection).get_table_names()}
        if len(taken) > 2:
            raise damaged()
        if taken:
            raise LogUnavailable(
                f"the session log cannot be opened: the database has a table {min(taken)} of another program: "
                "give the log a database of its own"
            )
        metadata.create_all(connection)
        connection.execute(sql.insert(log_format).values(version=FORMAT))
    version = connection.execute(sql.select(log_format.c.version)).scalar()
    if not isinstance(version, int):
        raise damaged()
    if not 1 <= version <= FORMAT:
        raise LogUnavailable(
            f"the session log has format {version}, and this version of warmturn reads formats 1 to {FORMAT}: "
            "serve it with the version that wrote it"
        )
    if version != format_of_columns(connection):
        raise damaged()
    if version < FORMAT:
        from_format(version, connection)
        connection.execute(sql.update(log_format).values(version=FORMAT))


def format_of_columns(connection: sql.Connection) -> int:
    """The format that the tables are of; 0 where they are of none."""

    def lacks(table: sql.Table) -> set[str]:
        there = inspector.get_columns(table.name) if inspector.has_table(table.name) else []
        return {*table.columns.keys()} - {column["name"] for column in there}

    inspector = sql.inspect(connection)
    if "checksum" in lacks(turns):
        return 1
    if "server" in lacks(tombstones):
        return 2
    if responses.name not in inspector.get_table_names():
        return 3
    if "receipt" in lacks(turns):
        return 4
    if chats_index.name not in {index["name"] for index in inspector.get_indexes(responses.name)}:
        return 5
    return 0 if any(lacks(table) for table in metadata.tables.values()) else FORMAT


def from_format(version: int, connection: sql.Connection) -> None:
    """Bring a log of an older format up to date, in the caller's transaction."""
    add_columns(connection, sessions, turns)
    if version >= 3:
        add_columns(connection, tombstones)
        metadata.create_all(connection)
        connection.exec_driver_sql("DROP INDEX IF EXISTS responses_unfinished")  # of format 4
        for index in responses.indexes:
            index.create(connection, checkfirst=True)
        return
    old = sql.Table(tombstones.name, sql.MetaData(), sql.Column("tenant"), sql.Column("session"))
    buried = [] if version == 1 else connection.execute(sql.select(old)).all()
    old.drop(connection, checkfirst=True)
    metadata.create_all(connection)
    if version == 1:
        for table in (sessions, turns):
            for index in table.indexes:
                index.create(connection, checkfirst=True)
        fill_in(connection)
    connection.execute(sql.insert(servers).values(id=ANYONE, seen=2**31))
    if buried:
        stones = [{"server": ANYONE, "tenant": row.tenant, "session": row.session} for row in buried]
        connection.execute(sql.insert(tombstones), stones)


def add_columns(connection: sql.Connection, *tables: sql.Table) -> None:
    """Give tables of an older format the columns that came later."""
    for table in tables:
        there = {column["name"] for column in sql.inspect(connection).get_columns(table.name)}
        for column in table.columns:
            if column.name not in there:
                definition = sql.schema.CreateColumn(column).compile(dialect=connection.dialect)
                connection.exec_driver_sql(f"ALTER TABLE {table.name} ADD COLUMN {definition}")


def fill_in(connection: sql.Connection) -> None:
    """Complete the rows of every session, and what ``sessions`` tells of them. The rows of format 1 are turns, and
    where their replies begin is not known."""
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
