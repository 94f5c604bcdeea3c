"""Creates the tables of a log, and upgrades logs of older formats."""

from __future__ import annotations

import sqlalchemy as sql

from server.log.database import LogUnavailable
from server.log.tables import (
    FORMAT,
    MIGRATION_LOCK,
    OLDEST_FORMAT,
    chats_index,
    damage_error,
    heartbeats,
    leases,
    log_format,
    metadata,
    responses,
    tombstones,
    turns,
)

FORMAT_5 = {  # the columns that came with it
    (turns.name, "receipt"),
    (tombstones.name, "life"),
    *((table.name, column) for table in (leases, heartbeats) for column in {*table.c.keys()}),
}


def prepare(connection: sql.Connection) -> None:
    """Create the tables of a new log, or upgrade those of an older one, in the caller's transaction. Raises
    LogUnavailable for a log of an unknown format, or if other tables have the same names; LogDamaged.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(sql.select(sql.func.pg_advisory_xact_lock(MIGRATION_LOCK)))
    if not sql.inspect(connection).has_table(log_format.name):
        taken = metadata.tables.keys() & {*sql.inspect(connection).get_table_names()}
        if len(taken) > 2:
            raise damage_error()
        if taken:
            raise LogUnavailable(
                f"the session log cannot be opened: the database has a table {min(taken)} of another program: "
                "give the log a database of its own"
            )
        metadata.create_all(connection)
        connection.execute(sql.insert(log_format).values(version=FORMAT))
    version = connection.execute(sql.select(log_format.c.version)).scalar()
    if not isinstance(version, int):
        raise damage_error()
    there = format_of_tables(connection)
    if version > FORMAT or (0 < version < OLDEST_FORMAT and there is None):
        raise LogUnavailable(
            f"the session log has format {version}, and this version of warmturn reads formats {OLDEST_FORMAT} to "
            f"{FORMAT}: use the version that wrote it, or begin with an empty log"
        )
    if version != there:
        raise damage_error()
    if version < FORMAT:
        upgrade(connection)
        connection.execute(sql.update(log_format).values(version=FORMAT))


def format_of_tables(connection: sql.Connection) -> int | None:
    """The format of the tables; None for a format that this version cannot read."""
    missing = missing_columns(connection)
    if missing:
        return 4 if (turns.name, "receipt") in missing and missing <= FORMAT_5 else None
    indexes = {index["name"] for index in sql.inspect(connection).get_indexes(responses.name)}
    return FORMAT if chats_index.name in indexes else 5


def missing_columns(connection: sql.Connection) -> set[tuple[str, str]]:
    """The columns of this format that the database does not have, as (table, column)."""
    inspector = sql.inspect(connection)
    missing = set()
    for table in metadata.tables.values():
        there = inspector.get_columns(table.name) if inspector.has_table(table.name) else []
        missing |= {(table.name, name) for name in {*table.c.keys()} - {column["name"] for column in there}}
    return missing


def upgrade(connection: sql.Connection) -> None:
    """Add the columns, tables and indexes of later formats, in the caller's transaction."""
    old = {*sql.inspect(connection).get_table_names()}
    for name, column in sorted(missing_columns(connection)):
        if name in old:
            definition = sql.schema.CreateColumn(metadata.tables[name].c[column]).compile(dialect=connection.dialect)
            connection.exec_driver_sql(f"ALTER TABLE {name} ADD COLUMN {definition}")
    metadata.create_all(connection)
    connection.exec_driver_sql("DROP INDEX IF EXISTS responses_unfinished")  # of format 4
    for table in metadata.tables.values():
        for index in table.indexes:
            index.create(connection, checkfirst=True)
