"""``SessionTable``: creates and changes sessions; one transaction per method. Reading is ``server.log.session_reader``.

What a session holds is the fold of its rows (``server.log.timeline``); how they are stored is in
``server.log.session_rows`` and ``server.log.stored``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import sqlalchemy as sql
from msgspec import UNSET, UnsetType
from sqlalchemy.exc import IntegrityError

from server.log import response_rows
from server.log.database import Database, LogUnavailable
from server.log.leases import Leases
from server.log.log_thread import LogThread
from server.log.logged_message import LoggedMessage
from server.log.media_rows import NO_MEDIA, hold_media
from server.log.portable import PortableLog, rows_of
from server.log.quota import Holdings
from server.log.response_rows import TurnExtras
from server.log.retries import Idempotency, remember_key
from server.log.search_index import index_messages
from server.log.session_models import copy_models, note_model
from server.log.session_reader import SessionReader, now
from server.log.session_rows import (
    ADD_ROW,
    UPDATE,
    delete_session,
    find_session,
    insert_session,
    insert_with_rows,
    is_expired,
    require_session,
    set_counts,
    set_metadata,
    summary_now,
    version_of,
)
from server.log.stored import SessionRow, columns_of, metadata_of
from server.log.tables import sessions
from server.log.timeline import (
    NewTurn,
    Row,
    SessionMoved,
    SessionSummary,
    Timeline,
    TurnRecord,
    place_of_token,
    place_of_turn,
)
from server.log.timeline_cache import CachedTimeline
from server.log.timeline_rows import copy_rows, edit_row, revise_row, rewind_row, turn_row
from server.media.media import PlacedMedia

T = TypeVar("T")

NO_EXTRAS = TurnExtras()


class SessionTable(SessionReader):
    """Sessions and their rows. Every method is one transaction on the log's thread, see SessionLog.

    Timelines in memory only have committed rows: a write that fails drops the cached timeline. A change first locks the
    session's row and then checks the session's lease. All servers use this order, which prevents deadlocks.
    """

    def __init__(self, database: Database, server: str, leases: Leases, thread: LogThread) -> None:
        super().__init__(database, thread)
        self._server = server
        self._leases = leases
        self.holdings = Holdings(thread)
        self._has_words_of_deleted = False  # in the search index

    # --- changing -----------------------------------------------------------------------------------------

    async def commit(
        self,
        tenant: str,
        session: str,
        turn: NewTurn,
        *,
        idempotency: Idempotency | None = None,
        extras: TurnExtras = NO_EXTRAS,
        expect: int | None = None,
    ) -> TurnRecord:
        """Append ``turn`` to the session, whose timeline becomes the turn's; an unknown session is created. ``extras``
        are written in the same transaction. If the turn's timeline differs from the logged one, the common beginning is
        kept, and turns that end after it are dropped. Raises SessionMoved, also if the idempotency key has a turn
        already, or if ``expect`` is not 0 and the session was deleted meanwhile.
        """

        def work(connection: sql.Connection) -> TurnRecord:
            row = find_session(connection, tenant, session, lock=True)
            self._leases.check_and_release(connection, (tenant, session))
            moment = now()
            if row is not None and is_expired(row, moment) and expect != version_of(row):
                delete_session(connection, row)
                row = None
            if row is None:
                if expect:
                    raise SessionMoved
                row = self._begin(connection, tenant, session, extras, moment)
            elif expect is not None and expect != version_of(row):
                raise SessionMoved
            cached = self._timelines.read(connection, row)
            added = turn_row(cached.timeline, turn, int(moment))
            if idempotency is not None:
                remember_key(connection, row, idempotency, moment)
            append_row(connection, row, cached, added, moment, extras.media)
            note_model(connection, row.id, turn.model)
            if extras.metadata is not None:
                set_metadata(connection, row.id, extras.metadata)
            if extras.response is not None:
                response_rows.put(connection, row, self._server, replace(extras.response, row=cached.timeline.number))
            return cached.timeline.turns[-1]

        def commit() -> TurnRecord:
            record = self._run_write(tenant, session, work)
            self._leases.mark_released((tenant, session))
            return record

        return await self._thread.run(commit)

    async def create(
        self,
        tenant: str,
        session: str,
        *,
        messages: Sequence[LoggedMessage] = (),
        metadata: Mapping[str, str] | None = None,
        ttl: int | None = None,
        pinned_until: int | None = None,
        media: Mapping[str, bytes] = NO_MEDIA,
    ) -> SessionSummary:
        """Create a session. Its ``messages`` are unrendered; with a ``ttl`` it expires that many seconds after the last
        change of its timeline. ``media``: bytes of its messages' media, by their digest. Raises SessionExists, and
        QuotaReached.
        """

        def work(connection: sql.Connection) -> SessionSummary:
            row = Row("create", int(moment := now()), "", messages=[*messages])
            facts = {"ttl": ttl, "pinned_until": pinned_until}
            return insert_with_rows(
                connection, self._leases, tenant, session, metadata or {}, facts, [row], moment, media
            )

        more = sum(map(len, media.values())) + sum(len(message.content) for message in messages)
        await self.holdings.check(tenant, begins=True, more=more)
        return await self._write(tenant, session, work)

    async def restore(
        self,
        tenant: str,
        session: str,
        log: PortableLog,
        *,
        metadata: Mapping[str, str] | None = None,
        ttl: int | None = None,
        media: Mapping[str, bytes] = NO_MEDIA,
    ) -> SessionSummary:
        """Create a session with the timeline of an export (``rows``). Its tokens are valid for models with
        ``log.fingerprint``; under another model, the next turn renders the messages again. Raises SessionExists,
        InvalidLog, QuotaReached.
        """

        def work(connection: sql.Connection) -> SessionSummary:
            rows = [*rows_of(log, int(moment := now()))]
            return insert_with_rows(
                connection, self._leases, tenant, session, metadata or {}, {"ttl": ttl}, rows, moment, media
            )

        await self.holdings.check(tenant, begins=True)
        return await self._write(tenant, session, work)

    async def fork(self, tenant: str, session: str, new: str, *, turn: int | None = None) -> SessionSummary:
        """Create ``new`` as a copy of ``session`` up to the end of a turn (0: empty; None: all), with its metadata and
        TTL. Raises UnknownSession, SessionExists, NoSuchPlace("turn"), QuotaReached.
        """

        def work(connection: sql.Connection) -> SessionSummary:
            row = require_session(find_session(connection, tenant, session, moment := now()))
            timeline = self._timelines.read(connection, row).timeline
            rows = [*copy_rows(timeline, turn, "fork", int(moment))]
            at = len(timeline.turns) if turn is None else turn
            facts = {"ttl": row.ttl, "parent": session, "parent_turn": at}
            metadata = metadata_of(connection, [row.id])[row.id]
            made = insert_with_rows(connection, self._leases, tenant, new, metadata, facts, rows, moment)
            copy_models(connection, row.id, require_session(find_session(connection, tenant, new, moment)).id)
            return made

        await self.holdings.check(tenant, begins=True)
        return await self._write(tenant, session, work)

    async def update(
        self,
        tenant: str,
        session: str,
        *,
        metadata: Mapping[str, str] | UnsetType = UNSET,
        ttl: int | UnsetType | None = UNSET,
        pinned_until: int | UnsetType | None = UNSET,
    ) -> SessionSummary:
        """Change the given properties. ``metadata`` replaces all pairs, a ``ttl`` counts from now. The timeline,
        ``used`` and ``version`` do not change, so no claim is needed. Raises UnknownSession.
        """

        def work(connection: sql.Connection) -> SessionSummary:
            row = require_session(find_session(connection, tenant, session, moment := now(), lock=True))
            changed: dict[str, Any] = {}
            if ttl is not UNSET:
                changed |= {"ttl": ttl, "expires": None if ttl is None else int(moment) + ttl}
            if pinned_until is not UNSET:
                changed["pinned_until"] = pinned_until
            if changed:
                connection.execute(UPDATE, {"row_id": row.id, **changed})
            if not isinstance(metadata, UnsetType):
                set_metadata(connection, row.id, metadata)
            return summary_now(connection, row.id, moment)

        return await self._write(tenant, session, work)

    async def rewind(
        self,
        tenant: str,
        session: str,
        *,
        turn: int | None = None,
        tokens: int | None = None,
        reply: LoggedMessage | None = None,
        expect: int | None = None,
    ) -> SessionSummary:
        """Cut the session back to the end of a turn (0: empty), or to a token; pass one of ``turn`` and ``tokens``.
        ``locate`` says where a rewind to a token ends; ``reply`` is what is left of a reply that is cut there. Raises
        UnknownSession, SessionMoved, NoSuchPlace. Raises ValueError if not exactly one is passed.
        """
        if (turn is None) == (tokens is None):
            raise ValueError("a rewind goes to a turn or to a token")

        def row_for(timeline: Timeline, created: int) -> Row:
            if tokens is None:
                place = place_of_turn(timeline.turns, turn or 0)
            else:
                place = place_of_token(timeline.turns, tokens)
            return rewind_row(timeline, place, reply, created)

        return await self._change(tenant, session, expect, row_for)

    async def edit(
        self,
        tenant: str,
        session: str,
        index: int,
        content: str,
        placed: Sequence[PlacedMedia] = (),
        *,
        expect: int | None = None,
        media: Mapping[str, bytes] = NO_MEDIA,
    ) -> SessionSummary:
        """Replace the content of message ``index``, text and media, and drop everything after it. The tokens are cut
        back to the end of the last reply before it; messages after that are unrendered. Raises UnknownSession,
        SessionMoved, NoSuchPlace("index").
        """
        return await self._change(
            tenant,
            session,
            expect,
            lambda timeline, created: edit_row(timeline, index, content, placed, created),
            media,
        )

    async def revise(
        self,
        tenant: str,
        session: str,
        keep: int,
        messages: Sequence[LoggedMessage],
        *,
        expect: int | None = None,
        media: Mapping[str, bytes] = NO_MEDIA,
    ) -> SessionSummary:
        """Replace the messages after the first ``keep`` ones by ``messages``. The tokens are cut back to the end of the
        last reply before; messages after that are unrendered. If no answered message is removed, the tokens stay.
        Raises UnknownSession, SessionMoved, NoSuchPlace("index").
        """
        kept = [*messages]
        return await self._change(
            tenant, session, expect, lambda timeline, created: revise_row(timeline, keep, kept, created), media
        )

    async def delete(self, tenant: str, session: str) -> int | None:
        """Delete the session and all its rows, and leave a tombstone until ``swept``. Returns the number of the *life*
        that ended (an id can be used again and then begins empty); None if the session is unknown.
        """

        def work(connection: sql.Connection) -> int | None:
            row = find_session(connection, tenant, session, now(), lock=True)
            self._leases.check(connection, (tenant, session))
            if row is None:
                return None
            delete_session(connection, row)
            return int(row.id)

        def delete() -> int | None:
            life = self._run_write(tenant, session, work)
            if life is not None:
                self._has_words_of_deleted = True
                self._timelines.forget((tenant, session))
                self._database.wipe()
            return life

        return await self._thread.run(delete)

    # --- on the log's thread ------------------------------------------------------------------------------

    def _begin(
        self, connection: sql.Connection, tenant: str, session: str, extras: TurnExtras, moment: float
    ) -> SessionRow:
        """Insert the session that begins with a turn. The turns of its parent are not copied if that is gone."""
        parent, at = extras.parent or (None, None)
        row = insert_session(connection, tenant, session, moment, ttl=extras.ttl, parent=parent, parent_turn=at)
        there = find_session(connection, tenant, parent) if extras.copies and parent is not None else None
        if there is None:
            return row
        timeline = self._timelines.read(connection, there).timeline
        made = self._timelines.read(connection, row)
        for copied in copy_rows(timeline, min(at or 0, len(timeline.turns)), "fork", int(moment)):
            append_row(connection, row, made, copied, moment)
            row = connection.execute(sql.select(sessions).where(sessions.c.id == row.id)).one()
        return row

    async def _write(self, tenant: str, session: str, work: Callable[[sql.Connection], T]) -> T:
        return await self._thread.run(lambda: self._run_write(tenant, session, work))

    def _run_write(self, tenant: str, session: str, work: Callable[[sql.Connection], T]) -> T:
        """Run a write that may change what is in memory of a session, and repeat it where it met another server's.
        Blocking. Raises LogUnavailable."""
        for last in (False, True):
            try:
                return self._database.write(work)
            except BaseException as error:
                self._timelines.forget((tenant, session))  # it may hold a row that was not committed
                if last and isinstance(error, IntegrityError):
                    raise LogUnavailable("the session log cannot be written: others write the same session") from error
                if not isinstance(error, IntegrityError):
                    raise
        raise AssertionError

    async def _change(
        self,
        tenant: str,
        session: str,
        expect: int | None,
        row_for: Callable[[Timeline, int], Row],
        media: Mapping[str, bytes] = NO_MEDIA,
    ) -> SessionSummary:
        """Add the row that is made from the timeline as it is and the time, in Unix seconds."""

        def work(connection: sql.Connection) -> SessionSummary:
            row = require_session(find_session(connection, tenant, session, moment := now(), lock=True))
            self._leases.check(connection, (tenant, session))
            if expect is not None and expect != version_of(row):
                raise SessionMoved
            cached = self._timelines.read(connection, row)
            append_row(connection, row, cached, row_for(cached.timeline, int(moment)), moment, media)
            return summary_now(connection, row.id, moment)

        return await self._write(tenant, session, work)


def append_row(
    connection: sql.Connection,
    row: SessionRow,
    cached: CachedTimeline,
    new: Row,
    moment: float,
    media: Mapping[str, bytes] = NO_MEDIA,
) -> None:
    """Insert one row with its media, and apply it to the timeline. Raises SessionMoved if the media are gone."""
    columns = columns_of(row.tenant, row.session, row.id, row.rows + 1, new)
    connection.execute(ADD_ROW, columns)
    hold_media(connection, row, new.messages, media)
    cached.apply(new, columns)
    set_counts(connection, row, cached.timeline, moment)
    index_messages(connection, row.id, new.keep_messages, new.messages)
