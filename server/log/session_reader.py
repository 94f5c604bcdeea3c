"""``SessionReader``: reads sessions: timelines, summaries, pages of a list, exports; one transaction per method."""

from __future__ import annotations

import time
from collections.abc import Sequence

import sqlalchemy as sql

from server.log import listing
from server.log.database import Database
from server.log.listing import SessionFamily, SessionFilter, SessionPage
from server.log.log_thread import LogThread
from server.log.portable import PortableLog, export_timeline
from server.log.retries import CommittedTurn, find_replay
from server.log.session_rows import (
    find_session,
    require_session,
    version_of,
)
from server.log.stored import facts_of, metadata_of, summaries_of
from server.log.timeline import (
    SessionRecord,
    SessionSummary,
)
from server.log.timeline_cache import TimelineCache

EVERY_SESSION = SessionFilter()


class SessionReader:
    """What can be asked of sessions without changing any. Every method runs on the log's thread, see SessionLog.

    Timelines that were read are kept in memory; they only have committed rows.
    """

    def __init__(self, database: Database, thread: LogThread) -> None:
        self._database = database
        self._thread = thread
        self._timelines = TimelineCache()

    async def get(self, tenant: str, session: str) -> SessionRecord | None:
        """The session as of its last row, whatever model wrote it; None if it is unknown."""

        def work(connection: sql.Connection) -> SessionRecord | None:
            row = find_session(connection, tenant, session, moment := now())
            if row is None:
                return None
            timeline = self._timelines.read(connection, row).timeline
            return SessionRecord(
                tokens=timeline.tokens.tolist(),
                messages=[*timeline.messages],
                rendered=timeline.rendered,
                turns=tuple(timeline.turns),
                version=version_of(row),
                **facts_of(row, metadata_of(connection, [row.id])[row.id], moment),
            )

        return await self._thread.read(work)

    async def summary(self, tenant: str, session: str) -> SessionSummary | None:
        """The session without its text, read from its counts; None if it is unknown."""

        def work(connection: sql.Connection) -> SessionSummary | None:
            row = find_session(connection, tenant, session, moment := now())
            return None if row is None else summaries_of(connection, [row], moment)[0]

        return await self._thread.read(work)

    async def page(
        self,
        tenant: str,
        chosen: SessionFilter = EVERY_SESSION,
        *,
        limit: int,
        after: str | None = None,
        descending: bool = True,
    ) -> SessionPage:
        """Up to ``limit`` of the ``chosen`` sessions after the session ``after``, in order of last use, latest first if
        ``descending``. Raises UnknownSession if ``after`` is unknown.
        """
        return await self._thread.read(
            lambda connection: listing.page(
                connection, tenant, chosen, limit=limit, after=after, descending=descending, now=now()
            )
        )

    async def metadata_keys(self, tenant: str, prefix: str) -> list[tuple[str, int]]:
        """The keys of metadata that begin with ``prefix``, each with the number of sessions that have it."""
        return await self._thread.read(lambda connection: listing.metadata_keys(connection, tenant, prefix, now()))

    async def find_by_names(self, tenant: str, names: Sequence[str]) -> list[SessionSummary]:
        """Those of the sessions with these names that exist, the one used last first."""
        return await self._thread.read(lambda connection: listing.find_by_names(connection, tenant, names, now()))

    async def family(self, tenant: str, session: str) -> SessionFamily:
        """The family of a session, see SessionFamily. Raises UnknownSession."""
        return await self._thread.read(lambda connection: listing.family(connection, tenant, session, now()))

    async def replay(self, tenant: str, session: str, key: str) -> CommittedTurn | None:
        """The turn that was committed under an idempotency key, also if later turns follow; None if there is none. A
        key is kept for two days, or as long as its session.
        """

        def work(connection: sql.Connection) -> CommittedTurn | None:
            row = find_session(connection, tenant, session, now())
            return None if row is None else find_replay(connection, row, key)

        return await self._thread.read(work)

    async def rows(self, tenant: str, session: str) -> PortableLog:
        """The current timeline in its portable form, for export. Raises UnknownSession."""

        def work(connection: sql.Connection) -> PortableLog:
            row = require_session(find_session(connection, tenant, session, now()))
            return export_timeline(self._timelines.read(connection, row).timeline, row.created)

        return await self._thread.read(work)


def now() -> float:
    """Unix seconds."""
    return time.time()
