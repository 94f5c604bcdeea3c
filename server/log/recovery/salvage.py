"""Salvage of a damaged log: the readable rows are copied to a new file, and the damaged one is renamed.

A row is taken if its checksum is right for its session. A session is whole if it has all its rows, up to the last
number that any record mentions. Any other session is kept as a name with one row too few, so that reading it is an
error until it is deleted: a session is never silently shorter.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sql
from msgspec import structs

from cache.durable_files import sync_path
from server.log.database import Database, Durability, LogDamaged, LogUnavailable
from server.log.logged_message import LoggedMessage
from server.log.media_rows import hold_media
from server.log.recovery.damaged_database import NAME, DamagedDatabase, Named
from server.log.recovery.sqlite_pages import DatabaseImage
from server.log.stored import row_of
from server.log.tables import ANYONE, FORMAT, OLDEST_FORMAT, labels, responses, retries, sessions, tombstones, turns
from server.log.timeline import Timeline
from server.log.upgrade import index_everything, prepare
from server.log.usage_rows import add_usage

logger = logging.getLogger("warmturn.sessions")

BESIDE = ("-starts", "-shm", "-wal", "")  # in the order in which they are set aside
FULL = "the session log cannot be opened: it is damaged, and what is left of it cannot be copied"


@dataclass(frozen=True)
class Salvage:
    """The result of a salvage. ``aside``: the new name of the damaged file. ``whole`` sessions are complete,
    ``refused`` ones cannot be read; of ``nameless`` ones there are rows, but not their names. ``torn``: the last
    committed turns may be missing without a trace.
    """

    aside: str
    whole: int
    refused: int
    nameless: int
    torn: bool


# --- the new log --------------------------------------------------------------------------------------------


class RecoveredLog:
    """A new log with the readable rows of a damaged one."""

    def __init__(self, damaged: DamagedDatabase, database: Database, torn: bool) -> None:
        self._damaged = damaged
        self._database = database
        self._torn = torn
        self._taken: set[Named] = set()
        self.whole = self.refused = self.nameless = 0

    def run(self) -> None:
        """Copy tombstones, usage, sessions with readable rows, then the names of the others. Raises LogUnavailable."""
        finds, doubtful = self._damaged.finds, []
        stones = [{"server": ANYONE, "tenant": tenant, "session": name} for tenant, name in sorted(finds.buried)]
        if stones:
            self._database.write(lambda connection: connection.execute(sql.insert(tombstones), stones))
        self._database.write(partial(add_usage, [*finds.usage.items()]))
        for id_ in self._damaged.ids():
            names = self._damaged.names(id_)
            found = {name: self._damaged.rows(id_, name) for name in names}
            name = max(names, key=lambda name: len(found[name]), default=None)
            if name is None:
                self.nameless += 1
            elif found[name]:
                self._copy(id_, name, found[name])
            else:
                doubtful.append((id_, names))
        for id_, names in doubtful:
            for name in names[:1] if id_ in finds.sessions else names:
                if name not in self._taken and name not in finds.buried and NAME.match(name[1]):
                    self._copy(id_, name, {})
                    break

    def _copy(self, id_: int, name: Named, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """One session. Where pages are of different times a tombstone can be newer than the session: it is refused."""
        if name in self._taken:
            return  # deleted, and begun anew since
        self._taken.add(name)
        facts = self._damaged.facts(id_, name)
        last = max(1, self._damaged.last(id_, rows, facts))
        if self._torn and name in self._damaged.finds.buried:
            rows = {}
        whole = len(rows) == last
        timeline = Timeline()
        said: list[LoggedMessage] = []
        for number in range(1, last + 1) if whole else ():
            row = row_of(*name, rows[number])
            timeline.apply(row)
            said += row.messages
        values = self._values(id_, name, facts, rows, timeline if whole else None, last)
        digests = {one.digest for message in said for one in message.media}
        media = {digest: data for digest in digests if (data := self._damaged.medium(name[0], digest)) is not None}
        kept = [structs.replace(m, media=tuple(one for one in m.media if one.digest in media)) for m in said]

        def work(connection: sql.Connection) -> None:
            self._insert(connection, values, list(rows.values()), whole)
            row = connection.execute(sql.select(sessions).where(sessions.c.id == id_)).one()
            hold_media(connection, row, kept, media)

        self._database.write(work)
        self.whole += whole
        self.refused += not whole

    def _values(
        self,
        id_: int,
        name: Named,
        facts: Mapping[str, Any],
        rows: Mapping[int, Mapping[str, Any]],
        timeline: Timeline | None,
        last: int,
    ) -> dict[str, Any]:
        """The columns of ``sessions``. What it tells of its timeline is that of the rows, where these are whole."""
        times = [columns["created"] for columns in rows.values()] or [0]
        values = {"created": min(times), "used": float(max(times)), **facts}
        values |= {"id": id_, "tenant": name[0], "session": name[1], "rows": last}
        if timeline is None:
            return values
        counts = {"turns": len(timeline.turns), "tokens": len(timeline.tokens), "messages": len(timeline.messages)}
        return {**values, **counts, "fingerprint": timeline.fingerprint}

    def _insert(
        self, connection: sql.Connection, values: dict[str, Any], rows: list[Mapping[str, Any]], whole: bool
    ) -> None:
        id_, finds = values["id"], self._damaged.finds
        connection.execute(sql.insert(sessions).values(values))
        if rows:
            connection.execute(sql.insert(turns), [dict(columns) for columns in rows])
        pairs = {key: {"session_id": id_, "key": key, "value": value} for key, value in finds.pairs(id_).items()}
        made = {columns["number"]: columns for columns in rows}
        keys = {
            key: {"session_id": id_, "key": key, "request_hash": hash_, "number": number, "created": created}
            for _, key, hash_, number, created in finds.retries[id_]
            if whole and number in made and made[number]["created"] == created  # the row of a key is as old as it
        }
        made_of = self._damaged.responses(id_, (values["tenant"], values["session"])) if whole else {}
        for table, lines in ((labels, pairs), (retries, keys), (responses, made_of)):
            if lines:
                connection.execute(sql.insert(table), [dict(line) for line in lines.values()])


def salvage_log(path: Path, durability: Durability) -> Salvage:
    """Replace a damaged log by a new one with its readable rows. Raises LogUnavailable if there is no room, if the file
    is not a log of this format, or if it is in use; nothing is changed then.
    """
    with DatabaseImage(path) as image:
        damaged = DamagedDatabase(image)
        if not damaged.is_ours and not Path(f"{path}-starts").is_file():  # which only a log has beside it
            raise LogDamaged("the session log cannot be opened: file is not a database, or not one of this program")
        version = max(damaged.finds.formats, default=FORMAT)
        if version > FORMAT or (version < OLDEST_FORMAT and not damaged.finds.rows):
            raise LogDamaged(
                f"the session log cannot be opened: it is damaged, and has format {version}, where this version of "
                f"warmturn can salvage formats {OLDEST_FORMAT} to {FORMAT}: put a backup in its place"
            )
        room(path)
        logger.error("the session log is damaged: its readable rows are being copied")
        part = Path(f"{path}.part")
        try:
            remove(part)
            database = Database(part, durability)
            try:
                database.prepare(prepare)
                copy = RecoveredLog(damaged, database, image.torn)
                copy.run()
                database.write(index_everything)
            finally:
                database.close()
        except (OSError, LogUnavailable) as error:
            remove(part)
            reason = error.message if isinstance(error, LogUnavailable) else error.strerror
            raise LogUnavailable(f"{FULL}: {reason}") from error
        stamp = new_stamp(path)
        sync_path(part)
        part.rename(ready := Path(f"{path}.salvaged-{stamp}"))
        sync_path(path.parent)
        finish(path, ready, stamp)
        return Salvage(aside(path, stamp).name, copy.whole, copy.refused, copy.nameless, image.torn)


def room(path: Path) -> None:
    """Raises LogUnavailable if the disk has no room for a copy."""
    wanted = sum(one.stat().st_size for one in (path, Path(f"{path}-wal")) if one.is_file())
    if shutil.disk_usage(path.parent).free < wanted + 2**20:
        raise LogUnavailable(f"{FULL}: the disk has no room for {wanted // 2**20 + 1} MB")


def finish(path: Path, ready: Path, stamp: str) -> None:
    """Rename the damaged files and move the new log in their place. If this is interrupted, the next start finishes it:
    while ``ready`` exists, the file at ``path`` is the damaged one.
    """
    for suffix in BESIDE:
        damaged = Path(f"{path}{suffix}")
        if damaged.is_symlink() or damaged.exists():
            damaged.rename(f"{aside(path, stamp)}{suffix}")
    sync_path(path.parent)
    ready.rename(path)
    sync_path(path.parent)


def resume(path: Path) -> None:
    """Finish a salvage that was interrupted."""
    for ready in path.parent.glob(f"{path.name}.salvaged-*"):
        if ready.is_file() and not ready.is_symlink() and ready.stat().st_uid == os.geteuid():
            finish(path, ready, ready.name.rpartition("-")[2])


def aside(path: Path, stamp: str) -> Path:
    """The new path of a damaged file."""
    return path.with_name(f"{path.name}.damaged-{stamp}")


def new_stamp(path: Path) -> str:
    """A timestamp that no renamed file has yet."""
    stamp = first = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    count = 1
    while any(os.path.lexists(f"{aside(path, stamp)}{suffix}") for suffix in BESIDE):
        count += 1
        stamp = f"{first}.{count}"
    return stamp


def remove(path: Path) -> None:
    for suffix in BESIDE:
        Path(f"{path}{suffix}").unlink(missing_ok=True)
