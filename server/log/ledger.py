"""The rows of sessions: read, fold and written. Blocking; used by the log's thread only."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import sqlalchemy as sql
from msgspec import UNSET, UnsetType
from sqlalchemy.exc import IntegrityError

from server.log import response_rows
from server.log.database import Database, LogUnavailable
from server.log.leases import Leases
from server.log.listing import SessionFamily, SessionFilter, SessionPage, family, page
from server.log.portable import PortableLog, portable, rows_of
from server.log.response_rows import TurnExtras
from server.log.retries import CommittedTurn, Idempotency, remember_key, replayed
from server.log.session_rows import (
    ADD_ROW,
    UPDATE,
    begin,
    bury,
    find,
    insert,
    is_over,
    known,
    set_counts,
    set_metadata,
    summary_now,
    version_of,
)
from server.log.stored import SessionRow, alive, columns_of, facts_of, metadata_of, summary_of
from server.log.tables import retries, sessions
from server.log.timeline import (
    Message,
    Row,
    SessionMoved,
    SessionRecord,
    SessionSummary,
    Timeline,
    TurnRecord,
    copied,
    edit_row,
    place_of_token,
    place_of_turn,
    revised_row,
    rewind_row,
    turn_row,
)
from server.log.timeline_cache import CachedTimeline, Key, TimelineCache

T = TypeVar("T")

EXPIRED_AT_ONCE = 50  # sessions deleted in one transaction


class Ledger:
    """Sessions and their rows in a database. ``now`` is Unix seconds; see SessionLog for what the verbs do.

    A timeline in memory is always that of rows which are committed: a write that fails drops it. What changes a
    timeline sees first that its session's lease is still this server's: that is locked behind the session's row, by
    everybody, so that none waits for another in a circle.
    """

    def __init__(self, database: Database, server: str, leases: Leases) -> None:
        self._database = database
        self._server = server
        self._leases = leases
        self._folds = TimelineCache()

    # --- reading ------------------------------------------------------------------------------------------

    def get(self, tenant: str, session: str, now: float) -> SessionRecord | None:
        """The session with its timeline."""

        def work(connection: sql.Connection) -> SessionRecord | None:
            row = find(connection, tenant, session, now)
            if row is None:
                return None
            timeline = self._folds.read(connection, row).timeline
            return SessionRecord(
                tokens=timeline.tokens.tolist(),
                messages=[*timeline.messages],
                rendered=timeline.rendered,
                turns=tuple(timeline.turns),
                version=version_of(row),
                **facts_of(row, metadata_of(connection, [row.id])[row.id], now),
            )

        return self._database.read(work)

    def summary(self, tenant: str, session: str, now: float) -> SessionSummary | None:
        """The session without its timeline."""

        def work(connection: sql.Connection) -> SessionSummary | None:
            row = find(connection, tenant, session, now)
            return None if row is None else summary_of(row, metadata_of(connection, [row.id])[row.id], now)

        return self._database.read(work)

    def page(
        self, tenant: str, chosen: SessionFilter, limit: int, after: str | None, descending: bool, now: float
    ) -> SessionPage:
        """Some sessions of a tenant."""
        return self._database.read(
            lambda connection: page(
                connection, tenant, chosen, limit=limit, after=after, descending=descending, now=now
            )
        )

    def family(self, tenant: str, session: str, now: float) -> SessionFamily:
        """A session with what it comes from and what comes from it."""
        return self._database.read(lambda connection: family(connection, tenant, session, now))

    def replay(self, tenant: str, session: str, key: str, now: float) -> CommittedTurn | None:
        """The turn of an idempotency key."""

        def work(connection: sql.Connection) -> CommittedTurn | None:
            row = find(connection, tenant, session, now)
            return None if row is None else replayed(connection, row, key)

        return self._database.read(work)

    def export(self, tenant: str, session: str, now: float) -> PortableLog:
        """The timeline on its own."""

        def work(connection: sql.Connection) -> PortableLog:
            row = known(find(connection, tenant, session, now))
            return portable(self._folds.read(connection, row).timeline, row.created)

        return self._database.read(work)

    def pinned(self, now: float) -> list[tuple[str, str, int]]:
        """Every session with a pin that holds."""
        query = sql.select(sessions.c.tenant, sessions.c.session, sessions.c.pinned_until)
        query = query.where(sessions.c.pinned_until > now, alive(now))
        return self._database.read(lambda connection: [(*row,) for row in connection.execute(query)])

    # --- changing -----------------------------------------------------------------------------------------

    def commit(
        self,
        tenant: str,
        session: str,
        tokens: array[int],
        messages: Sequence[Message],
        prompt_tokens: int,
        *,
        cached: int,
        fingerprint: str,
        finish_reason: str,
        receipt: str | None,
        idempotency: Idempotency | None,
        beside: TurnExtras,
        expect: int | None,
        now: float,
    ) -> TurnRecord:
        """One more turn, and what it brings along."""

        def work(connection: sql.Connection) -> TurnRecord:
            row = find(connection, tenant, session, lock=True)
            self._leases.spend(connection, (tenant, session))
            if row is not None and is_over(row, now) and expect != version_of(row):
                bury(connection, row)
                row = None
            if row is None:
                if expect:
                    raise SessionMoved
                parent, turn = beside.parent or (None, None)
                row = begin(connection, tenant, session, now, ttl=beside.ttl, parent=parent, parent_turn=turn)
            elif expect is not None and expect != version_of(row):
                raise SessionMoved
            fold = self._folds.read(connection, row)
            added = turn_row(
                fold.timeline,
                tokens,
                messages,
                prompt_tokens,
                cached=cached,
                fingerprint=fingerprint,
                finish_reason=finish_reason,
                receipt=receipt,
                now=int(now),
            )
            if idempotency is not None:
                remember_key(connection, row, idempotency, now)
            self._append(connection, row, fold, added, now)
            if beside.metadata is not None:
                set_metadata(connection, row.id, beside.metadata)
            if beside.response is not None:
                response = replace(beside.response, row=fold.timeline.number)
                response_rows.put(connection, row, self._server, response)
            return fold.timeline.turns[-1]

        turn = self._write(tenant, session, work)
        self._leases.spent((tenant, session))
        return turn

    def create(
        self,
        tenant: str,
        session: str,
        messages: Sequence[Message],
        metadata: Mapping[str, str],
        ttl: int | None,
        pinned_until: int | None,
        now: float,
    ) -> SessionSummary:
        """A session that has no turn yet."""
        row = Row("create", int(now), "", messages=messages)
        return self._begin(tenant, session, metadata, {"ttl": ttl, "pinned_until": pinned_until}, [row], now)

    def restore(
        self,
        tenant: str,
        session: str,
        log: PortableLog,
        metadata: Mapping[str, str],
        ttl: int | None,
        now: float,
    ) -> SessionSummary:
        """A session with the timeline of another log."""
        return self._begin(tenant, session, metadata, {"ttl": ttl}, [*rows_of(log, int(now))], now)

    def fork(self, tenant: str, session: str, new: str, turn: int | None, now: float) -> SessionSummary:
        """A session with the timeline of another one."""

        def work(connection: sql.Connection) -> SessionSummary:
            row = known(find(connection, tenant, session, now))
            timeline = self._folds.read(connection, row).timeline
            copies = [*copied(timeline, turn, "fork", int(now))]
            at = len(timeline.turns) if turn is None else turn
            facts = {"ttl": row.ttl, "parent": session, "parent_turn": at}
            metadata = metadata_of(connection, [row.id])[row.id]
            return insert(connection, self._leases, tenant, new, metadata, facts, copies, now)

        return self._write(tenant, session, work)

    def update(
        self,
        tenant: str,
        session: str,
        metadata: Mapping[str, str] | UnsetType,
        ttl: int | UnsetType | None,
        pinned_until: int | UnsetType | None,
        now: float,
    ) -> SessionSummary:
        """Other facts, the same timeline."""

        def work(connection: sql.Connection) -> SessionSummary:
            row = known(find(connection, tenant, session, now, lock=True))
            changed: dict[str, Any] = {}
            if ttl is not UNSET:
                changed |= {"ttl": ttl, "expires": None if ttl is None else int(now) + ttl}
            if pinned_until is not UNSET:
                changed["pinned_until"] = pinned_until
            if changed:
                connection.execute(UPDATE, {"row_id": row.id, **changed})
            if not isinstance(metadata, UnsetType):
                set_metadata(connection, row.id, metadata)
            return summary_now(connection, row.id, now)

        return self._write(tenant, session, work)

    def rewind(
        self,
        tenant: str,
        session: str,
        turn: int | None,
        tokens: int | None,
        reply: Message | None,
        expect: int | None,
        now: float,
    ) -> SessionSummary:
        """Back to a turn, or else to a token."""

        def row_for(timeline: Timeline) -> Row:
            place = (
                place_of_turn(timeline.turns, turn or 0) if tokens is None else place_of_token(timeline.turns, tokens)
            )
            return rewind_row(timeline, place, reply, int(now))

        return self._change(tenant, session, expect, now, row_for)

    def edit(
        self, tenant: str, session: str, index: int, content: str, expect: int | None, now: float
    ) -> SessionSummary:
        """Another content for a message."""
        return self._change(tenant, session, expect, now, lambda timeline: edit_row(timeline, index, content, int(now)))

    def revise(
        self, tenant: str, session: str, keep: int, messages: Sequence[Message], expect: int | None, now: float
    ) -> SessionSummary:
        """Other messages from number ``keep`` on."""
        return self._change(
            tenant, session, expect, now, lambda timeline: revised_row(timeline, keep, messages, int(now))
        )

    # --- the end ------------------------------------------------------------------------------------------

    def delete(self, tenant: str, session: str, now: float) -> int | None:
        """Rows out, tombstone in."""

        def work(connection: sql.Connection) -> int | None:
            row = find(connection, tenant, session, now, lock=True)
            self._leases.check(connection, (tenant, session))
            if row is None:
                return None
            bury(connection, row)
            return int(row.id)

        deleted = self._write(tenant, session, work)
        if deleted is not None:
            self._folds.forget((tenant, session))
            self._database.wipe()
        return deleted

    def expire(self, held: frozenset[Key], now: float) -> list[Key]:
        """Delete some sessions past their TTL that neither this process (``held``) nor another server holds; [] when
        there are no more."""

        def work(connection: sql.Connection) -> list[Key]:
            due = sql.select(sessions).where(sessions.c.expires <= int(now)).order_by(sessions.c.expires)
            rows = connection.execute(due.with_for_update(skip_locked=True)).all()
            busy = held | self._leases.elsewhere(connection) if rows else held
            over = [row for row in rows if (row.tenant, row.session) not in busy][:EXPIRED_AT_ONCE]
            for row in over:
                bury(connection, row)
            return [(row.tenant, row.session) for row in over]

        deleted = self._database.write(work)
        for key in deleted:
            self._folds.forget(key)
        if deleted:
            self._database.wipe()
        return deleted

    def forget_keys(self, before: float) -> None:
        """Drop the idempotency keys of turns that were committed before a time."""
        old = retries.c.created < int(before)
        if self._database.read(lambda connection: connection.execute(sql.select(sql.exists().where(old))).scalar_one()):
            self._database.write(lambda connection: connection.execute(sql.delete(retries).where(old)))

    # --- within -------------------------------------------------------------------------------------------

    def _write(self, tenant: str, session: str, work: Callable[[sql.Connection], T]) -> T:
        """Run a write that may change what is in memory of a session. Repeated where it met another server's."""
        for last in (False, True):
            try:
                return self._database.write(work)
            except BaseException as error:
                self._folds.forget((tenant, session))  # it may hold a row that was not committed
                if last and isinstance(error, IntegrityError):
                    raise LogUnavailable("the session log cannot be written: others write the same session") from error
                if not isinstance(error, IntegrityError):
                    raise
        raise AssertionError

    def _begin(
        self,
        tenant: str,
        session: str,
        metadata: Mapping[str, str],
        facts: Mapping[str, Any],
        rows: Sequence[Row],
        now: float,
    ) -> SessionSummary:
        """A session with these rows. Raises SessionExists."""
        return self._write(
            tenant, session, lambda c: insert(c, self._leases, tenant, session, metadata, facts, rows, now)
        )

    def _change(
        self, tenant: str, session: str, expect: int | None, now: float, row_for: Callable[[Timeline], Row]
    ) -> SessionSummary:
        """Add the row that is made from the timeline as it is."""

        def work(connection: sql.Connection) -> SessionSummary:
            row = known(find(connection, tenant, session, now, lock=True))
            self._leases.check(connection, (tenant, session))
            if expect is not None and expect != version_of(row):
                raise SessionMoved
            fold = self._folds.read(connection, row)
            self._append(connection, row, fold, row_for(fold.timeline), now)
            return summary_now(connection, row.id, now)

        return self._write(tenant, session, work)

    def _append(self, connection: sql.Connection, row: SessionRow, fold: CachedTimeline, new: Row, now: float) -> None:
        """Write one row, and fold it."""
        columns = columns_of(row.tenant, row.session, row.id, row.rows + 1, new)
        connection.execute(ADD_ROW, columns)
        fold.apply(new, columns)
        set_counts(connection, row, fold.timeline, now)
