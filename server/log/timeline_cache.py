"""A cache of timelines in memory, so that a turn reads only rows that are new to this server."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sql

from server.log.claims import Key
from server.log.database import SessionDamaged
from server.log.stored import SessionRow, row_of
from server.log.tables import turns
from server.log.timeline import Row, Timeline

REMEMBERED = 256  # sessions
REMEMBERED_BYTES = 64 * 2**20  # of the rows that these are the fold of


@dataclass
class CachedTimeline:
    """The timeline of the session with row id ``id``, made from ``size`` bytes of rows."""

    id: int
    timeline: Timeline = field(default_factory=Timeline)
    size: int = 0

    def apply(self, row: Row, columns: Mapping[str, Any]) -> None:
        self.timeline.apply(row)
        self.size += len(columns["tokens"]) + len(columns["messages"]) + len(columns["receipt"] or "")


class TimelineCache:
    """The most recently used timelines. Call ``forget`` for one that may contain uncommitted rows."""

    def __init__(self) -> None:
        self._timelines: OrderedDict[Key, CachedTimeline] = OrderedDict()

    def read(self, connection: sql.Connection, row: SessionRow) -> CachedTimeline:
        """The timeline as in the database: the cached one plus the rows since. Raises SessionDamaged."""
        key = row.tenant, row.session
        cached = self._timelines.pop(key, None)
        # Another id: deleted and begun again. Fewer rows: a database that was set back.
        if cached is None or cached.id != row.id or cached.timeline.number > row.rows:
            cached = CachedTimeline(row.id)
        if cached.timeline.number < row.rows:
            newer = sql.select(turns).where(turns.c.session_id == row.id, turns.c.number > cached.timeline.number)
            for stored in connection.execute(newer.order_by(turns.c.number)).mappings():
                if stored["number"] != cached.timeline.number + 1:
                    break
                columns = dict(**stored)
                cached.apply(row_of(*key, columns), columns)
        if cached.timeline.number != row.rows:
            raise SessionDamaged("a row of the session log is missing")
        self._timelines[key] = cached
        while len(self._timelines) > 1 and self._too_much():
            self._timelines.popitem(last=False)
        return cached

    def forget(self, key: Key) -> None:
        self._timelines.pop(key, None)

    def _too_much(self) -> bool:
        size = sum(cached.size for cached in self._timelines.values())
        return len(self._timelines) > REMEMBERED or size > REMEMBERED_BYTES
