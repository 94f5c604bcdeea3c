"""Creates the tables of a log, and upgrades logs of older formats."""

from __future__ import annotations

import sqlalchemy as sql
from sqlalchemy.schema import CreateIndex, CreateTable

from server.log.database import LogUnavailable, SessionDamaged
from server.log.search_index import create_index, empty_index, has_index, index_messages, index_title, is_sound
from server.log.stored import metadata_of
from server.log.tables import (
    FORMAT,
    MIGRATION_LOCK,
    OLDEST_FORMAT,
    chats_index,
    damage_error,
    define_for_postgresql,
    heartbeats,
    key_usage,
    leases,
    log_format,
    media,
    media_refs,
    message_texts,
    metadata,
    responses,
    session_vectors,
    sessions,
    shares,
    tombstones,
    turns,
)
from server.log.timeline_cache import TimelineCache

FORMAT_5 = {  # the columns that came with it
    (turns.name, "receipt"),
    (tombstones.name, "life"),
    *((table.name, column) for table in (leases, heartbeats) for column in {*table.c.keys()}),
}
FORMAT_7 = {(table.name, column) for table in (media, media_refs) for column in {*table.c.keys()}}
SQLITE_COLUMNS = (
    "SELECT tables.name, columns.name FROM sqlite_master AS tables JOIN pragma_table_info(tables.name) AS columns "
    "WHERE tables.type = 'table'"
)

FORMAT_8 = {(message_texts.name, column) for column in {*message_texts.c.keys()}}

FORMAT_9 = {(key_usage.name, column) for column in {*key_usage.c.keys()}}
FORMAT_10 = {(shares.name, column) for column in {*shares.c.keys()}}
FORMAT_11 = {(session_vectors.name, column) for column in {*session_vectors.c.keys()}}


def prepare(connection: sql.Connection) -> None:
    """Create the tables of a new log, or upgrade those of an older one, in the caller's transaction. Raises
    LogUnavailable for a log of an unknown format, or if other tables have the same names; LogDamaged.
    """
    if connection.dialect.name == "postgresql":
        define_for_postgresql()
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
        for statement in statements(connection.dialect):
            connection.exec_driver_sql(statement)
        create_index(connection)
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
    elif not is_sound(connection):
        empty_index(connection)
        index_everything(connection)


_statements: dict[str, list[str]] = {}  # of ``statements``, by the dialect's name


def statements(dialect: sql.Dialect) -> list[str]:
    """What creates all tables and their indexes. Made once: that takes longer than to run them."""
    if dialect.name not in _statements:
        made: list[CreateTable | CreateIndex] = []
        for table in metadata.sorted_tables:
            made += [CreateTable(table), *map(CreateIndex, sorted(table.indexes, key=lambda index: str(index.name)))]
        _statements[dialect.name] = [str(one.compile(dialect=dialect)) for one in made]
    return _statements[dialect.name]


def format_of_tables(connection: sql.Connection) -> int | None:
    """The format of the tables; None for a format that this version cannot read."""
    missing = missing_columns(connection)
    if not missing:
        return FORMAT if has_index(connection) else None
    missing -= FORMAT_11
    if not missing:
        return 10 if has_index(connection) else None
    missing -= FORMAT_10
    if not missing:
        return 9 if has_index(connection) else None
    if missing == FORMAT_9:
        return 8 if has_index(connection) else None
    missing -= FORMAT_8 | FORMAT_9
    if missing - FORMAT_7:
        return 4 if (turns.name, "receipt") in missing and missing <= FORMAT_5 | FORMAT_7 else None
    indexes = {index["name"] for index in sql.inspect(connection).get_indexes(responses.name)}
    if missing:
        return (6 if chats_index.name in indexes else 5) if missing == FORMAT_7 else None
    return 7 if chats_index.name in indexes else None


def missing_columns(connection: sql.Connection) -> set[tuple[str, str]]:
    """The columns of this format that the database does not have, as (table, column)."""
    wanted = {(table.name, name) for table in metadata.tables.values() for name in {*table.c.keys()}}
    if connection.dialect.name == "sqlite":  # SQLAlchemy asks twice for each table
        return wanted - {(table, column) for table, column in connection.exec_driver_sql(SQLITE_COLUMNS)}
    there = sql.inspect(connection).get_multi_columns()
    return wanted - {(table, column["name"]) for (_, table), columns in there.items() for column in columns}


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
    if not has_index(connection):
        create_index(connection)
        index_everything(connection)


def index_everything(connection: sql.Connection) -> None:
    """Add the texts of all sessions to the search index. Those of damaged ones are left out."""
    for row in connection.execute(sql.select(sessions).order_by(sessions.c.id)).all():
        try:
            timeline = TimelineCache().read(connection, row).timeline
        except SessionDamaged:
            continue
        index_messages(connection, row.id, 0, timeline.messages)
        index_title(connection, row.id, metadata_of(connection, [row.id])[row.id])
