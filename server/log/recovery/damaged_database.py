"""Identifies the records of a damaged log by their shapes and checksums, whatever page they are on."""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import sqlalchemy as sql

from server.log.database import SessionDamaged
from server.log.media_rows import name_of
from server.log.recovery.sqlite_pages import DatabaseImage, Place, SqliteRecord
from server.log.response_rows import checksum as response_checksum
from server.log.session_models import MODEL
from server.log.stored import row_of
from server.log.tables import log_format, metadata, responses, sessions, turns
from server.log.usage_rows import DayOfKey, Spent

NAME = re.compile(r"[A-Za-z0-9_.:@-]{1,128}\Z")  # of a session
ROW_SIZES = (len(turns.columns) - 1, len(turns.columns))  # rows of format 4 end before their receipt

Named = tuple[str, str]  # tenant, session


@dataclass
class FoundRecords:
    """The records of an image, assigned to tables by their shape; every table has a different one."""

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
    media: dict[str, list[Place]] = field(default_factory=lambda: defaultdict(list))
    usage: dict[DayOfKey, Spent] = field(default_factory=dict)

    def add(self, record: SqliteRecord) -> None:
        """One record. Rows of timelines, responses and media are only noted: they are read again later."""
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
            case (str(tenant), str(key), str(day), int(n), int(new), int(old), int(made), int(s) | float(s)), int():
                place, found = DayOfKey(tenant, key, day), Spent(n, new, old, made, s)
                if min(found) >= 0 and found > self.usage.get(place, Spent()):  # older copies have less
                    self.usage[place] = found
            case (str(name), bytes()), int():
                self.media[name].append(record.place)
            case (str(), str(tenant), str(session), int()), int():
                self.buried.add((tenant, session))
            case (*_, str(tenant), str(session)), int() if 2 <= len(values) <= 3:  # of format 4 and before
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
        """The metadata and models of a session, from its ``labels``, or else from both of their indexes."""
        labels = [
            (key, *self.label_values.get(row_id, ("", ""))) for owner, key, row_id in self.label_keys if owner == id_
        ]
        pairs = {key: value for key, same, value in labels if key == same} | {key: v for _, key, v in self.labels[id_]}
        return {key: value for key, value in pairs.items() if is_label(key) and is_json_text(value)}


class DamagedDatabase:
    """The sessions in an image."""

    def __init__(self, image: DatabaseImage) -> None:
        self._image = image
        self.finds = FoundRecords()
        for record in image.records():
            self.finds.add(record)

    @property
    def is_ours(self) -> bool:
        """Whether this was a session log. Files of other programs are not moved."""
        tables = self.finds.tables
        if tables:
            return log_format.name in tables or len(tables & metadata.tables.keys()) > 2
        return bool(self.finds.rows) or self._image.is_database or self._image.is_empty()

    def ids(self) -> list[int]:
        """The row ids of all sessions that any record mentions, newest first."""
        found = {*self.finds.sessions, *self.finds.names, *self.finds.rows}
        return sorted((id_ for id_ in found if 0 < id_ < 2**31), reverse=True)

    def names(self, id_: int) -> list[Named]:
        """The possible names of a session, the most likely first."""
        likely = [(facts[1], facts[2]) for facts in sorted(self.finds.sessions[id_], key=last_of, reverse=True)]
        return [*dict.fromkeys([*likely, *sorted(self.finds.names[id_])])]

    def rows(self, id_: int, name: Named) -> dict[int, Mapping[str, Any]]:
        """The rows of this session whose checksum is right, by number, as columns of ``turns``."""
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

    def medium(self, tenant: str, digest: str) -> bytes | None:
        """The bytes of a medium, if they are whole."""
        for place in self.finds.media[name_of(tenant, digest)]:
            record = self._image.record(place)
            data = None if record is None else record.values[1]
            if isinstance(data, bytes) and hashlib.sha256(data).hexdigest() == digest:
                return data
        return None

    def facts(self, id_: int, name: Named) -> dict[str, Any]:
        """The newest valid row of the session in ``sessions``; {} if there is none."""
        for values in sorted(self.finds.sessions[id_], key=last_of, reverse=True):
            facts = dict(zip(sessions.columns.keys(), values, strict=True))
            if (facts["tenant"], facts["session"]) == name and all(
                is_right(column, facts[column.name]) for column in sessions.columns
            ):
                return {**facts, "used": float(facts["used"])}
        return {}

    def last(self, id_: int, rows: Mapping[int, Any], facts: Mapping[str, Any]) -> int:
        """The highest row number that any record mentions."""
        numbers = [number for number, row_id in self.finds.numbers[id_] if self._unknown(row_id)]
        return max([0, int(facts.get("rows", 0)), *rows, *self.finds.rows[id_], *(n for n in numbers if n < 2**31)])

    def _unknown(self, row_id: int) -> bool:
        """Whether an index points to a row that is not there; where it points to one that is, it tells nothing new."""
        return row_id not in self.finds.row_ids


def last_of(facts: Sequence[Any]) -> int:
    """The number of rows of a record of ``sessions``."""
    rows = facts[list(sessions.columns.keys()).index("rows")]
    return int(rows) if isinstance(rows, int) else -1


def is_right(column: sql.Column[Any], value: Any) -> bool:
    """Whether a value has the type of a column."""
    if value is None:
        return bool(column.nullable)
    if isinstance(column.type, sql.String):
        return isinstance(value, str)
    if isinstance(column.type, sql.Double):
        return isinstance(value, int | float)
    return isinstance(value, int) and value >= 0


def is_label(key: str) -> bool:
    """Whether this is the key of a label: a JSON string, or what ``server.log.session_models`` writes."""
    return is_json_text(key) or (key.startswith(MODEL) and is_json_text(key[len(MODEL) : -1]))


def is_json_text(text: str) -> bool:
    try:
        return isinstance(json.loads(text), str)
    except ValueError:
        return False
