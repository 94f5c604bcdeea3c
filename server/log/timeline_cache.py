"""Folded timelines in memory, so that a turn reads only the rows that are new to this server."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sql

from server.log.database import SessionDamaged
from server.log.stored import SessionRow, row_of
from server.log.tables import turns
from server.log.timeline import Row, Timeline

Key = tuple[str, str]  # tenant, session

REMEMBERED = 256  # sessions
REMEMBERED_BYTES = 64 * 2**20  # of the rows that these are the fold of


@dataclass
class CachedTimeline:
    """A timeline as the fold of ``size`` bytes of rows of the session with this row ``id``."""

    id: int
    timeline: Timeline = field(default_factory=Timeline)
    size: int = 0

    def apply(self, row: Row, columns: Mapping[str, Any]) -> None:
        """Add the next row."""
        self.timeline.apply(row)
        self.size += len(columns["tokens"]) + len(columns["messages"]) + len(columns["receipt"] or "")


class TimelineCache:
    """The timelines used last. One that may hold what was not committed has to be forgotten."""

    def __init__(self) -> None:
        self._folds: OrderedDict[Key, CachedTimeline] = OrderedDict()

    def read(self, connection: sql.Connection, row: SessionRow) -> CachedTimeline:
        """The timeline as the database has it: what is in memory of it, and the rows since. Raises SessionDamaged."""
        key = row.tenant, row.session
        fold = self._folds.pop(key, None)
        # Another id: deleted and begun again. Fewer rows: a database that was set back.
        if fold is None or fold.id != row.id or fold.timeline.number > row.rows:
            fold = CachedTimeline(row.id)
        if fold.timeline.number < row.rows:
            newer = sql.select(turns).where(turns.c.session_id == row.id, turns.c.number > fold.timeline.number)
            for stored in connection.execute(newer.order_by(turns.c.number)).mappings():
                if stored["number"] != fold.timeline.number + 1:
                    break
                columns = dict(**stored)
                fold.apply(row_of(*key, columns), columns)
        if fold.timeline.number != row.rows:
            raise SessionDamaged("a row of the session log is missing")
        self._folds[key] = fold
        while len(self._folds) > 1 and self._too_much():
            self._folds.popitem(last=False)
        return fold

    def forget(self, key: Key) -> None:
        """Read this session anew next time."""
        self._folds.pop(key, None)

    def _too_much(self) -> bool:
        size = sum(fold.size for fold in self._folds.values())
        return len(self._folds) > REMEMBERED or size > REMEMBERED_BYTES
