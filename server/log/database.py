"""``Database``: transactions on SQLite or PostgreSQL, and the errors they raise.

LogUnavailable
+-- LogFull         no storage left to write to
+-- LogLocked       rows are locked by another server's transaction
+-- LogDamaged      stored data is not what was written
    +-- SessionDamaged  the same for one session
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import sqlalchemy as sql
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from cache.durable_files import sync_path
from scheduler.extras import install_command

logger = logging.getLogger("warmturn.sessions")

T = TypeVar("T")
Durability = Literal["process", "power"]

AWAY_SECONDS = 1.0  # that a database which did not answer is not asked again, so that callers do not queue up
# How a connection to PostgreSQL is made, where its URL does not say. A network path that is dead without a word is
# noticed after some 11 s of silence, or 15 s without an acknowledgement; the kernel's own patience is minutes to hours.
# Where somebody acknowledges and nobody answers, ``server.log.postgres`` gives up.
CONNECTION = {
    "connect_timeout": 5,  # s
    "keepalives_idle": 5,  # s
    "keepalives_interval": 2,  # s
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,  # ms
}
CHECKED_BYTES = 256 * 2**20  # a larger file is not read through when it is opened; that takes about a second
BALLAST = bytes(64 * 1024)
STORAGE_TROUBLES = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}
DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
REMEDY = "move the file and its -wal and -shm away to begin with an empty log, or put a backup in their place"


class LogUnavailable(Exception):
    """The log cannot be read or written now. ``message`` is one line for people, without paths and passwords. HTTP
    503.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class LogFull(LogUnavailable):
    """The log cannot be written because the disk is full, read-only or failing. HTTP 507."""


class LogLocked(LogUnavailable):
    """PostgreSQL: another transaction held locks on the rows for longer than ``lock_timeout``."""


class LogDamaged(LogUnavailable):
    """Stored data is not what was written."""


class SessionDamaged(LogDamaged):
    """Rows of one session are damaged or lost. It can only be listed and deleted. HTTP 410."""


_opened: list[str] = []  # the SQLite files that this process has open, one entry for each database


def is_open_here(path: Path) -> bool:
    """Whether this process has this SQLite file open. It must not open it beside SQLite then: whoever closes a file
    loses all locks that the process has on it.
    """
    return os.path.realpath(path) in _opened


class Database:
    """Transactions on one database, used from at most two threads. ``full``: a write failed for lack of storage, and
    none has succeeded since. Writes exclude each other: on SQLite from the beginning of the transaction, on PostgreSQL
    from the first locked row.
    """

    def __init__(self, where: Path | str, durability: Durability) -> None:
        """Open the database; see SessionLog. Raises LogUnavailable."""
        self.full = False
        self._away_until = 0.0
        url = url_of(where)
        self._password = str(url.password or "")
        is_file = url.get_backend_name() == "sqlite"
        self._file: str | None = None  # of ``_opened``
        try:
            self._engine = file_engine(url, durability) if is_file else server_engine(url, durability)
        except (SQLAlchemyError, ImportError) as error:
            raise LogUnavailable(f"the session log cannot be opened: {self._reason(error)}") from error
        try:
            if is_file:
                create_file(Path(url.database or ""))
                self._file = os.path.realpath(url.database or "")
                _opened.append(self._file)
                self._check()
        except (SQLAlchemyError, sqlite3.Error, OSError) as error:
            self.close()
            raise self._trouble(error, "cannot be opened") from error
        except UnicodeDecodeError as error:  # SQLite complains of a schema in the schema's own words
            self.close()
            raise LogDamaged(f"the session log cannot be opened: it is damaged: {REMEDY}") from error
        except LogUnavailable:
            self.close()
            raise

    def prepare(self, work: Callable[[sql.Connection], None]) -> None:
        """Run ``work`` in a transaction that creates or upgrades the tables. Raises LogUnavailable."""
        try:
            with self._connection(writes=True) as connection, connection.begin():
                work(connection)
        except SQLAlchemyError as error:
            raise self._trouble(error, "cannot be opened") from error

    def close(self) -> None:
        self._engine.dispose()
        if self._file:
            _opened.remove(self._file)
            self._file = None

    def read(self, work: Callable[[sql.Connection], T]) -> T:
        """Run ``work`` in a read transaction, on one snapshot. Raises LogUnavailable."""
        try:
            with self._connection() as connection, connection.begin():
                return work(connection)
        except SQLAlchemyError as error:
            raise self._trouble(error, "cannot be read") from error

    def write(self, work: Callable[[sql.Connection], T]) -> T:
        """Run ``work`` in a write transaction. Raises IntegrityError if it conflicts with another server's write: read
        again and retry. Raises LogUnavailable; LogFull for lack of storage.
        """
        try:
            with self._connection(writes=True) as connection, connection.begin():
                return work(connection)
        except IntegrityError:
            raise
        except SQLAlchemyError as error:
            trouble = self._trouble(error, "cannot be written")
            if isinstance(trouble, LogFull) and not self.full:  # other troubles say nothing of room
                self.full = True
                logger.error(
                    "%s; until there is room, turns that would have to be stored are refused with 507", trouble
                )
            raise trouble from error

    def try_to_write(self, table: sql.Table) -> None:
        """Write about as much as a turn does to an empty table, and delete it again; afterwards ``full`` is false.
        Raises as ``write`` does.
        """
        self.write(lambda connection: connection.execute(sql.insert(table).values(data=BALLAST)))
        self.write(lambda connection: connection.execute(sql.delete(table)))
        if self.full:
            logger.warning("the session log can be written again")
        self.full = False

    def wipe(self) -> None:
        """Truncate SQLite's write-ahead log, so that deleted data is removed from it too. Succeeds only while nobody
        reads.
        """
        if self._engine.dialect.name != "sqlite":
            return  # PostgreSQL keeps dead rows until it vacuums
        with suppress(SQLAlchemyError, sqlite3.Error), closing(self._engine.raw_connection()) as connection:
            connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").close()

    def _check(self) -> None:
        """See that a file which is there is whole. Raises LogDamaged."""
        with closing(self._engine.raw_connection()) as connection:
            pages = connection.cursor().execute("PRAGMA page_count").fetchone()[0]
            size = pages * connection.cursor().execute("PRAGMA page_size").fetchone()[0]
            if size > CHECKED_BYTES:
                return
            found = connection.cursor().execute("PRAGMA integrity_check(1)").fetchone()[0]
        if found != "ok":
            raise LogDamaged(f"the session log cannot be opened: it is damaged: {REMEDY}")

    @contextmanager
    def _connection(self, **options: Any) -> Iterator[sql.Connection]:
        if time.monotonic() < self._away_until:
            raise LogUnavailable("the database of the session log does not answer")
        try:
            connection = self._engine.connect()
        except SQLAlchemyError:
            self._away_until = time.monotonic() + AWAY_SECONDS
            raise
        with connection:
            if connection.dialect.name == "postgresql" and not options:
                options = {"isolation_level": "REPEATABLE READ"}
            yield connection.execution_options(**options)

    def _trouble(self, error: Exception, what: str) -> LogUnavailable:
        code = getattr(error_of(error), "sqlite_errorcode", 0) & 0xFF
        state = getattr(error_of(error), "sqlstate", None) or ""
        message = f"the session log {what}: {self._reason(error)}"
        if code in DAMAGE:
            return LogDamaged(f"{message}: {REMEDY}")
        if state == "55P03":
            return LogLocked(message)
        full = code in STORAGE_TROUBLES or state == "58030" or (state.startswith("53") and state != "53300")
        return LogFull(message) if full and what == "cannot be written" else LogUnavailable(message)

    def _reason(self, error: Exception) -> str:
        """The database's or the system's own words in one line, without statement, values, path or password."""
        if isinstance(error, OSError):
            return error.strerror or type(error).__name__
        if isinstance(error, ImportError):
            return f"its driver is not installed: {install_command('postgres')}"
        original = error_of(error)
        said = next(iter(str(original).splitlines()), "") if not isinstance(original, SQLAlchemyError) else ""
        if self._password:
            said = said.replace(self._password, "***")
        return said or type(error).__name__


def error_of(error: Exception) -> BaseException:
    """The driver's exception inside SQLAlchemy's."""
    return getattr(error, "orig", None) or error


def url_of(where: Path | str) -> sql.URL:
    """The log's location as SQLAlchemy's URL. Raises LogUnavailable, without quoting ``where``."""
    if isinstance(where, Path):
        return sql.URL.create("sqlite", database=str(where))
    try:
        url = sql.make_url(where)
    except (SQLAlchemyError, ValueError):
        raise LogUnavailable("the session log cannot be opened: its database URL cannot be read") from None
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    if url.drivername not in ("postgresql+psycopg", "sqlite"):
        raise LogUnavailable("the session log cannot be opened: its URL begins with postgresql:// or sqlite:///")
    if url.drivername == "sqlite" and url.database in (None, "", ":memory:"):
        raise LogUnavailable("the session log cannot be opened: sqlite:/// is followed by the path of a file")
    return url


def file_engine(url: sql.URL, durability: Durability) -> sql.Engine:
    """An SQLAlchemy engine for SQLite, with explicit BEGIN."""
    engine = sql.create_engine(url)
    synchronous = "FULL" if durability == "power" else "NORMAL"
    pragmas = [
        "journal_mode = WAL",
        f"synchronous = {synchronous}",
        "foreign_keys = ON",
        "busy_timeout = 5000",
        "secure_delete = ON",  # what is deleted is overwritten
    ]

    def set_pragmas(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver begins no transactions of its own
        connection.text_factory = lambda data: data.decode(errors="replace")  # damaged text is for checksums to find
        cursor = connection.cursor()
        for pragma in pragmas:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    def begin(connection: sql.Connection) -> None:
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    sql.event.listen(engine, "connect", set_pragmas)
    sql.event.listen(engine, "begin", begin)
    return engine


def server_engine(url: sql.URL, durability: Durability) -> sql.Engine:
    """An SQLAlchemy engine for PostgreSQL, which replaces lost connections."""
    arguments = {name: value for name, value in CONNECTION.items() if name not in url.query}
    from server.log.postgres import STATEMENT_SECONDS, be_patient

    engine = sql.create_engine(url, pool_pre_ping=True, pool_size=2, connect_args=arguments)
    be_patient(engine)
    settings = [f"statement_timeout = '{STATEMENT_SECONDS}s'", "lock_timeout = '10s'"]
    settings.append("idle_in_transaction_session_timeout = '10s'")  # a server that is paused keeps no locks
    if durability == "power":  # else as the database server is set up
        settings.append("synchronous_commit = on")

    def set_up(connection: Any, _record: Any) -> None:
        with connection.cursor() as cursor:
            for setting in settings:
                cursor.execute(f"SET {setting}")
        connection.commit()

    sql.event.listen(engine, "connect", set_up)
    return engine


def create_file(path: Path) -> None:
    """Create the file, readable by this user only, if it does not exist; else see that it can be written."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        if not is_open_here(path):
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        return
    sync_path(path.parent)
