"""Opens the log; a damaged one is salvaged first."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import sqlalchemy as sql

from server.log.database import Database, Durability, LogDamaged, LogFull, LogUnavailable, is_open_here, url_of
from server.log.recovery.salvage import Salvage, resume, salvage_log
from server.log.recovery.sqlite_pages import MAGIC, head_of
from server.log.recovery.wal import WAL_MAGIC, Wal, content
from server.log.upgrade import prepare

logger = logging.getLogger("warmturn.sessions")

OPENING = Lock()  # one thread at a time: see ``is_open_here``
OLDER = (
    "the session log is an older one than was here before, or a new one: sessions and turns since then are missing, "
    "and what was deleted since then is back; if you have put a backup in its place, this is what it holds"
)
IN_USE = 128  # the byte of the wal-index on which every process that uses a log holds a lock


class OpenedLog(NamedTuple):
    """An opened log. ``salvage``: the result of a salvage, None if none was needed. ``older``: it was opened more often
    than it knows, so the file is an older copy, or a new one in place of another.
    """

    database: Database
    salvage: Salvage | None = None
    older: bool = False


def open_log(where: Path | str, durability: Durability) -> OpenedLog:
    """Open a log, and salvage it if it is damaged. Raises LogUnavailable."""
    path = file_of(where)
    if path is None:
        return open_database(where, durability)
    with OPENING, alone(path, shared=isinstance(where, str)):
        try:
            resume(path)
            if not is_torn(path):
                with suppress(LogDamaged):
                    opened = open_database(where, durability, path)
                    if opened.older:
                        logger.error(OLDER)
                    return opened
            if is_in_use(path):
                raise LogDamaged("the session log cannot be opened: it is damaged, and it is in use")
            salvage = salvage_log(path, durability)
        except OSError as error:
            raise LogUnavailable(f"the session log cannot be opened: {error.strerror}") from error
        logger.error(report(salvage))
        return open_database(where, durability, path)._replace(salvage=salvage, older=False)


@contextmanager
def alone(path: Path, shared: bool) -> Iterator[None]:
    """Keep other processes from opening a log outside a server's own data dir until this one has checked its files.
    Raises LogUnavailable.
    """
    if not shared:
        yield
        return
    try:
        lock = os.open(f"{path}-opening", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LogUnavailable(f"the session log cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def open_database(where: Path | str, durability: Durability, path: Path | None = None) -> OpenedLog:
    """The database with its tables; of a file, this start is counted. Raises LogUnavailable."""
    database = Database(where, durability)
    try:
        database.prepare(prepare)
        return OpenedLog(database, older=path is not None and is_older(database, path))
    except BaseException:
        database.close()
        raise


def file_of(where: Path | str) -> Path | None:
    """The path of an SQLite file; None for PostgreSQL. Raises LogUnavailable for an invalid URL."""
    url = url_of(where)
    return Path(url.database or "") if url.get_backend_name() == "sqlite" else None


def is_torn(path: Path) -> bool:
    """Whether opening the file would lose commits: SQLite reads the write-ahead log only up to the first damaged frame,
    and deletes one beside an empty file. Of a file that this process has open SQLite knows better.
    """
    if is_open_here(path):
        return False
    main, wal, index = (head_of(Path(f"{path}{suffix}")) for suffix in ("", "-wal", "-shm"))
    if index.startswith((MAGIC, WAL_MAGIC)) or (main and not main.startswith(MAGIC)) or (wal and not main):
        return True
    return not is_in_use(path) and not Wal(Path(f"{path}-wal"), Path(f"{path}-shm")).sound


def is_older(database: Database, path: Path) -> bool:
    """Count this start in the log and in a file beside it. Returns whether the file has counted more starts than the
    log.
    """

    def count_start(connection: sql.Connection) -> int:
        """Count one more start. Servers that start at the same time count one each."""
        starts = max(int(connection.exec_driver_sql("PRAGMA user_version").scalar_one()), starts_in_file) + 1
        connection.exec_driver_sql(f"PRAGMA user_version = {starts}")
        return starts

    beside = Path(f"{path}-starts")
    text = content(beside)
    starts_in_file = int(text) if text.isdigit() and len(text) < 10 else 0
    count = database.read(lambda connection: int(connection.exec_driver_sql("PRAGMA user_version").scalar_one()))
    with suppress(LogFull, OSError):  # a disk that takes nothing now is no reason not to start
        starts = database.write(count_start)
        part = Path(f"{beside}.part")
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(b"%d" % starts)
        part.rename(beside)
    database.full = False
    return count < starts_in_file


def is_in_use(path: Path) -> bool:
    """Whether this or another process has the log open."""
    if is_open_here(path):
        return True
    try:
        index = os.open(f"{path}-shm", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.lockf(index, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, IN_USE)
    except OSError:
        return True
    finally:
        os.close(index)
    return False


def report(salvage: Salvage) -> str:
    """The result of a salvage, as text for the terminal."""
    text = (
        f"the session log was damaged: it was set aside as {salvage.aside}, and {salvage.whole} sessions go on as they "
        f"were; {salvage.refused} have lost rows and are refused until they are deleted"
    )
    if salvage.nameless:
        text += f"; {salvage.nameless} have lost their names"
    if salvage.torn:
        text += "; what was written last may be missing"
    return text
