"""A log whose file is damaged: what can still be read goes into a new one, and the damaged one is set aside.

In the order of what is certain: rows whose checksum holds under the name of their session are true. A session is whole
if it has all its rows, up to the last number that anything tells of. Any other is kept as a name that cannot be read,
with a row less than it should have, until it is deleted: it is never silently shorter.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import sqlalchemy as sql

from server.database import Database, Durability, LogDamaged, LogUnavailable, SessionDamaged
from server.pages import Image, Place, Record
from server.response_rows import checksum as response_checksum
from server.stored import row_of
from server.tables import (
    ANYONE,
    FORMAT,
    labels,
    log_format,
    metadata,
    prepare,
    responses,
    retries,
    sessions,
    tombstones,
    turns,
)
from server.timeline import Timeline

logger = logging.getLogger("warmturn.sessions")

BESIDE = ("-starts", "-shm", "-wal", "")  # in the order in which they are set aside
NAME = re.compile(r"[A-Za-z0-9_.:@-]{1,128}\Z")  # of a session
ROW_SIZES = (len(turns.columns) - 1, len(turns.columns))  # rows of format 4 end before their receipt
FULL = "the session log cannot be opened: it is damaged, and what is left of it cannot be copied"

Named = tuple[str, str]  # tenant, session


@dataclass(frozen=True)
class Salvage:
    """How it ended. ``aside``: the name of the damaged file now. ``whole`` sessions go on as they were, ``refused``
    ones are not to be read; of ``nameless`` ones there are rows, but nothing tells whose. ``torn``: turns that were
    committed last may be missing without a trace."""

    aside: str
    whole: int
    refused: int
    nameless: int
    torn: bool


@dataclass
class Finds:
    """What the records of an image are, told by their shape: every table has another one."""

    tables: set[str] = field(default_factory=set)
    formats: set[int] = field(default_factory=set)
    sessions: dict[int, list[tuple[Any, ...]]] = field(default_factory=lambda: defaultdict(list))
    rows: dict[int, dict[int, list[Place]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    row_ids: dict[int, tuple[int, int]] = field(default_factory=dict)  # of rows: their session and number
    names: dict[int, set[Named]] = field(default_factory=lambda: defaultdict(set))  # that indexes tell
    numbers: dict[int, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))  # and their row ids
    buried: set[Named] = field(default_factory=set)
    labels: dict[int, list[tuple[Any, ...]]] = field(default_factory=lambda: defaultdict(list))
    label_keys: set[tuple[int, str, int]] = field(default_factory=set)  # session, key and row id, in one index
    label_values: dict[int, Named] = field(default_factory=dict)  # key and value by row id, in another one
    retries: dict[int, list[tuple[Any, ...]]] = field(default_factory=lambda: defaultdict(list))
    responses: dict[int, list[Place]] = field(default_factory=lambda: defaultdict(list))

    def add(self, record: Record) -> None:
        """One record. Rows of timelines and responses are only noted: they are read again when they are copied."""
        values = record.values
        match values, record.rowid:
            case (None, str(), str(), *_), int(id_) if len(values) == len(sessions.columns):
                self.sessions[id_].append((id_, *values[1:]))
            case (int(id_), int(number), *_), int(row_id) if len(values) in ROW_SIZES:
                self.rows[id_][number].append(record.place)
                self.row_ids[row_id] = id_, number
            case (int(id_), str(), str()), int():
                self.labels[id_].append(values)
            case (int(id_), str(), str(), int(), int()), int():
                self.retries[id_].append(values)
            case (int(id_), str(), str(), str(), int(), *_), int() if len(values) == len(responses.columns):
                self.responses[id_].append(record.place)
            case (*_, str(tenant), str(session)), int() if 2 <= len(values) <= 3:
                self.buried.add((tenant, session))
            case ("table", str(name), *_), int() if len(values) == 5:
                self.tables.add(name)
            case (int(version),), int():
                self.formats.add(version)
            case (str(tenant), str(session), int(id_)), None if NAME.match(session):
                self.names[id_].add((tenant, session))
            case (str(key), str(value), int(row_id)), None:
                self.label_values[row_id] = key, value
            case (int(id_), str(key), int(row_id)), None:
                self.label_keys.add((id_, key, row_id))
            case (int(id_), int(number), int(row_id)), None:
                self.numbers[id_].add((number, row_id))

    def pairs(self, id_: int) -> dict[str, str]:
        """The metadata of a session, as ``labels`` or else both of its indexes tell it."""
        told = [
            (key, *self.label_values.get(row_id, ("", ""))) for owner, key, row_id in self.label_keys if owner == id_
        ]
        pairs = {key: value for key, same, value in told if key == same} | {key: v for _, key, v in self.labels[id_]}
        return {key: value for key, value in pairs.items() if is_json_text(key) and is_json_text(value)}


class Wreck:
    """The sessions in an image."""

    def __init__(self, image: Image) -> None:
        self._image = image
        self.finds = Finds()
        for record in image.records():
            self.finds.add(record)

    @property
    def is_ours(self) -> bool:
        """Whether this has been a log. Another program's file is not ours to move."""
        tables = self.finds.tables
        if tables:
            return log_format.name in tables or len(tables & metadata.tables.keys()) > 2
        return bool(self.finds.rows) or self._image.is_database or self._image.is_empty()

    def ids(self) -> list[int]:
        """The row ids of all sessions that anything tells of, the newest first."""
        found = {*self.finds.sessions, *self.finds.names, *self.finds.rows}
        return sorted((id_ for id_ in found if 0 < id_ < 2**31), reverse=True)

    def names(self, id_: int) -> list[Named]:
        """What a session may be called, the likeliest first."""
        told = [(facts[1], facts[2]) for facts in sorted(self.finds.sessions[id_], key=last_of, reverse=True)]
        return [*dict.fromkeys([*told, *sorted(self.finds.names[id_])])]

    def rows(self, id_: int, name: Named) -> dict[int, Mapping[str, Any]]:
        """The rows whose checksum says that they are this session's, by number, as columns of ``turns``."""
        found: dict[int, Mapping[str, Any]] = {}
        for number, places in sorted(self.finds.rows[id_].items()):
            for place in places:
                record = self._image.record(place)
                if record is None:
                    continue
                columns = dict(zip_longest(turns.columns.keys(), record.values))
                try:
                    row_of(*name, columns)
                except SessionDamaged:
                    continue
                found[number] = columns
        return found

    def responses(self, id_: int, name: Named) -> dict[str, Mapping[str, Any]]:
        """The responses of a session whose checksum holds, by key, as columns of ``responses``."""
        found: dict[str, Mapping[str, Any]] = {}
        for place in self.finds.responses[id_]:
            record = self._image.record(place)
            if record is not None:
                columns: dict[str, Any] = dict(zip(responses.columns.keys(), record.values, strict=True))
                if response_checksum(*name, columns) == columns["checksum"]:
                    found[str(columns["key"])] = columns
        return found

    def facts(self, id_: int, name: Named) -> dict[str, Any]:
        """What the table ``sessions`` tells of it, newest first; {} where that is lost or is nothing it could tell."""
        for values in sorted(self.finds.sessions[id_], key=last_of, reverse=True):
            facts = dict(zip(sessions.columns.keys(), values, strict=True))
            if (facts["tenant"], facts["session"]) == name and all(
                is_right(column, facts[column.name]) for column in sessions.columns
            ):
                return {**facts, "used": float(facts["used"])}
        return {}

    def last(self, id_: int, rows: Mapping[int, Any], facts: Mapping[str, Any]) -> int:
        """The number of the last row that anything tells of."""
        told = [number for number, row_id in self.finds.numbers[id_] if self._unknown(row_id)]
        return max([0, int(facts.get("rows", 0)), *rows, *self.finds.rows[id_], *(n for n in told if n < 2**31)])

    def _unknown(self, row_id: int) -> bool:
        """Whether an index points to a row that is not there; where it points to one that is, it tells nothing new."""
        return row_id not in self.finds.row_ids


def last_of(facts: Sequence[Any]) -> int:
    """The number of rows of a record of ``sessions``."""
    rows = facts[list(sessions.columns.keys()).index("rows")]
    return int(rows) if isinstance(rows, int) else -1


def is_right(column: sql.Column[Any], value: Any) -> bool:
    """Whether a column can hold a value."""
    if value is None:
        return bool(column.nullable)
    if isinstance(column.type, sql.String):
        return isinstance(value, str)
    if isinstance(column.type, sql.Double):
        return isinstance(value, int | float)
    return isinstance(value, int) and value >= 0


def is_json_text(text: str) -> bool:
    """Whether this is a string as JSON writes it."""
    try:
        return isinstance(json.loads(text), str)
    except ValueError:
        return False


# --- the new log --------------------------------------------------------------------------------------------


class Copy:
    """A new log that a wreck is copied to."""

    def __init__(self, wreck: Wreck, database: Database, torn: bool) -> None:
        self._wreck = wreck
        self._database = database
        self._torn = torn
        self._taken: set[Named] = set()
        self.whole = self.refused = self.nameless = 0

    def run(self) -> None:
        """Copy all that is certain, then the names of the rest. Raises LogUnavailable."""
        finds, doubtful = self._wreck.finds, []
        stones = [{"server": ANYONE, "tenant": tenant, "session": name} for tenant, name in sorted(finds.buried)]
        if stones:
            self._database.write(lambda connection: connection.execute(sql.insert(tombstones), stones))
        for id_ in self._wreck.ids():
            names = self._wreck.names(id_)
            found = {name: self._wreck.rows(id_, name) for name in names}
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
        facts = self._wreck.facts(id_, name)
        last = max(1, self._wreck.last(id_, rows, facts))
        if self._torn and name in self._wreck.finds.buried:
            rows = {}
        whole = len(rows) == last
        timeline = Timeline()
        for number in range(1, last + 1) if whole else ():
            timeline.apply(row_of(*name, rows[number]))
        values = self._values(id_, name, facts, rows, timeline if whole else None, last)
        self._database.write(lambda connection: self._insert(connection, values, list(rows.values()), whole))
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
        id_, finds = values["id"], self._wreck.finds
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
        made_of = self._wreck.responses(id_, (values["tenant"], values["session"])) if whole else {}
        for table, lines in ((labels, pairs), (retries, keys), (responses, made_of)):
            if lines:
                connection.execute(sql.insert(table), [dict(line) for line in lines.values()])


def salvaged(path: Path, durability: Durability) -> Salvage:
    """Replace a damaged log by what is left of it; see the module. Raises LogUnavailable where there is no room, where
    the file is no log of this format, and where it is in use; nothing is changed then."""
    with Image(path) as image:
        wreck = Wreck(image)
        if not wreck.is_ours and not Path(f"{path}-starts").is_file():  # which only a log has beside it
            raise LogDamaged("the session log cannot be opened: file is not a database, or not one of this program")
        told = max(wreck.finds.formats, default=FORMAT)
        if told > FORMAT or (told == 1 and not wreck.finds.rows):  # the rows of format 1 have other columns
            raise LogDamaged(
                f"the session log cannot be opened: it is damaged, and has format {told}, where this version of "
                f"warmturn can salvage formats 2 to {FORMAT}: put a backup in its place"
            )
        room(path)
        logger.error("the session log is damaged: what can be read of it is being copied")
        part = Path(f"{path}.part")
        try:
            remove(part)
            database = Database(part, durability)
            try:
                database.prepare(prepare)
                copy = Copy(wreck, database, image.torn)
                copy.run()
            finally:
                database.close()
        except (OSError, LogUnavailable) as error:
            remove(part)
            said = error.message if isinstance(error, LogUnavailable) else error.strerror
            raise LogUnavailable(f"{FULL}: {said}") from error
        stamp = new_stamp(path)
        synced(part)
        part.rename(ready := Path(f"{path}.salvaged-{stamp}"))
        synced(path.parent)
        finish(path, ready, stamp)
        return Salvage(aside(path, stamp).name, copy.whole, copy.refused, copy.nameless, image.torn)


def room(path: Path) -> None:
    """Raises LogUnavailable where the disk cannot hold a copy."""
    wanted = sum(one.stat().st_size for one in (path, Path(f"{path}-wal")) if one.is_file())
    if shutil.disk_usage(path.parent).free < wanted + 2**20:
        raise LogUnavailable(f"{FULL}: the disk has no room for {wanted // 2**20 + 1} MB")


def finish(path: Path, ready: Path, stamp: str) -> None:
    """Set the damaged files aside and put the new log in their place. Cut short anywhere, it is finished at the next
    start: while ``ready`` is there, what lies at ``path`` is the damaged one."""
    for suffix in BESIDE:
        damaged = Path(f"{path}{suffix}")
        if damaged.is_symlink() or damaged.exists():
            damaged.rename(f"{aside(path, stamp)}{suffix}")
    synced(path.parent)
    ready.rename(path)
    synced(path.parent)


def resume(path: Path) -> None:
    """Finish a salvage that was cut short."""
    for ready in path.parent.glob(f"{path.name}.salvaged-*"):
        if ready.is_file() and not ready.is_symlink() and ready.stat().st_uid == os.geteuid():
            finish(path, ready, ready.name.rpartition("-")[2])


def aside(path: Path, stamp: str) -> Path:
    """Where a damaged file goes."""
    return path.with_name(f"{path.name}.damaged-{stamp}")


def new_stamp(path: Path) -> str:
    """Now, as no file that was set aside is named."""
    stamp = first = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    count = 1
    while any(os.path.lexists(f"{aside(path, stamp)}{suffix}") for suffix in BESIDE):
        count += 1
        stamp = f"{first}.{count}"
    return stamp


def synced(path: Path) -> None:
    """What a file or folder holds is on the disk."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def remove(path: Path) -> None:
    """A database that was begun and not finished."""
    for suffix in BESIDE:
        Path(f"{path}{suffix}").unlink(missing_ok=True)
