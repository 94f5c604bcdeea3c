"""``SessionLog``: opens, cleans up and closes the session log. The sessions themselves are in
``server.log.session_table``, and how they are read in ``server.log.session_reader``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import sqlalchemy as sql

from server.log.chat_rows import ChatLog
from server.log.claims import Key
from server.log.database import Durability, LogFull
from server.log.leases import Leases
from server.log.log_thread import LogThread
from server.log.media_rows import MediaLog
from server.log.recovery.mending import open_log
from server.log.response_rows import ResponseLog
from server.log.search_index import erase_words
from server.log.servers import Servers
from server.log.session_locks import SessionLocks
from server.log.session_reader import now
from server.log.session_rows import delete_session
from server.log.session_table import SessionTable
from server.log.share_rows import ShareLog
from server.log.stored import is_unexpired
from server.log.tables import ANYONE, ballast, retries, sessions
from server.log.usage_rows import UsageLog
from server.log.vector_rows import SessionVectors

KEY_SECONDS = 48 * 3600  # that an idempotency key is remembered
EXPIRED_AT_ONCE = 50  # sessions deleted in one transaction


class SessionLog(SessionTable, SessionLocks):
    """The log. All blocking work runs on one thread of its own, so the writes of a server have one order.

    Every method is atomic, and durable when it returns: against a crash of the process, with ``durability="power"``
    also against loss of power. Methods raise LogUnavailable if the database cannot be used, and LogFull if it cannot be
    written for lack of storage; they have no effect then. Methods that need the timeline of a session with lost rows
    raise SessionDamaged, until the session is deleted. A tenant's session is unknown to all other tenants. An expired
    session is unknown too, also before ``expire`` has deleted it.

    Methods that change a session do not claim it: the caller does. If several servers share the log, sessions are held
    against the other servers too (``server.log.leases``): a change of a session whose lease this server has lost raises
    SessionMoved and writes nothing. ``commit`` is the last call under its claim.

    ``expect`` is the ``version`` of the record that the change is based on (0: there was none); if another server has
    changed the session since, SessionMoved is raised and nothing is written. None: no check.
    """

    def __init__(
        self,
        where: Path | str,
        durability: Durability = "process",
        server: str = ANYONE,
        on_unregistered: Callable[[], object] | None = None,
    ) -> None:
        """Open or create the log: an SQLite file, readable by this user only, or a database URL (``postgresql://...``,
        ``sqlite:///path``), which several servers may share. ``server`` is this server's id in that database and stays
        the same after a restart. Raises LogUnavailable, whose message is one line without passwords.

        A damaged file is renamed, and its readable rows are copied to a new log: see ``salvage``, None otherwise.
        ``older``: the file is an older copy of the log that was here before, or a new one in its place. ``responses``
        and ``chats`` are the stored responses and chats of its sessions, ``media`` the bytes of their media, ``shares``
        their links, ``vectors`` what is searched by meaning, ``usage`` what the keys have used.
        ``on_unregistered`` is called if this server is new to this log, or was away for so long that tombstones are
        gone: its KV cache must be emptied.
        """
        self._database, self.salvage, self.older = open_log(where, durability)
        thread = LogThread(self._database)
        leases = Leases(self._database, server, shared=not isinstance(where, Path))
        SessionTable.__init__(self, self._database, server, leases, thread)
        SessionLocks.__init__(self, leases, thread)
        self._servers = Servers(self._database, server)
        self.responses = ResponseLog(self._database, server, leases, thread)
        self.chats = ChatLog(self._database, server, thread)
        self.media = MediaLog(thread)
        self.usage = UsageLog(self._database, thread)
        self.shares = ShareLog(thread)
        self.vectors = SessionVectors(thread)
        try:
            leases.begin()
            if on_unregistered is not None and not self._servers.is_registered():
                on_unregistered()
            self._servers.register(now())
            with suppress(LogFull):  # no reason not to start: whoever looks for one tells so then
                self.responses.fail_unfinished()
        except BaseException:
            self._database.close()
            raise

    async def close(self) -> None:
        """Finish queued work, release all leases, and close the database."""
        self.usage.write_soon()
        self._thread.submit(self._erase_words)
        await super().close()
        self._database.close()

    async def find_pinned(self, moment: float) -> list[tuple[str, str, int]]:
        """(tenant, session, until) of every session that is pinned at ``moment`` (Unix seconds)."""
        query = sql.select(sessions.c.tenant, sessions.c.session, sessions.c.pinned_until)
        query = query.where(sessions.c.pinned_until > moment, is_unexpired(moment))
        return await self._thread.read(lambda connection: [(*row,) for row in connection.execute(query)])

    async def expire(self, moment: float) -> list[Key]:
        """Delete every session that is past its TTL at ``moment`` (Unix seconds) and that no server holds, and drop old
        idempotency keys. Returns the deleted sessions.
        """
        deleted: list[Key] = []
        while some := await self._thread.run(partial(self._expire_some, self._claims.claimed_keys(), moment)):
            deleted += some  # a few at a time: turns are committed in between
        await self._thread.run(self._erase_words)
        await self._thread.run(lambda: self._servers.register(moment))
        await self._thread.run(lambda: self._forget_keys(moment - KEY_SECONDS))
        return deleted

    async def tombstones(self) -> dict[Key, int]:
        """The deleted sessions of which this server's engine may still have KV, whichever server deleted them, each
        with the life that ended last.
        """
        return await self._thread.run(self._servers.tombstones)

    async def swept(self, tenant: str, session: str, life: int) -> None:
        """Record that this server's engine has no KV of this or an earlier life of a deleted session."""
        await self._thread.run(lambda: self._servers.swept(tenant, session, life))

    @property
    def full(self) -> bool:
        """Whether the last write failed for lack of storage."""
        return self._database.full

    async def writable(self) -> None:
        """If the last write failed for lack of storage, try one; raises LogFull if it fails again. Otherwise does
        nothing.
        """
        if self._database.full:
            await self._thread.run(lambda: self._database.try_to_write(ballast))

    # --- on the log's thread ------------------------------------------------------------------------------

    def _expire_some(self, held: frozenset[Key], moment: float) -> list[Key]:
        """Delete some sessions past their TTL that neither this process (``held``) nor another server holds; [] when
        there are no more."""

        def work(connection: sql.Connection) -> list[Key]:
            due = sql.select(sessions).where(sessions.c.expires <= int(moment)).order_by(sessions.c.expires)
            rows = connection.execute(due.with_for_update(skip_locked=True)).all()
            busy = held | self._leases.held_by_others(connection) if rows else held
            over = [row for row in rows if (row.tenant, row.session) not in busy][:EXPIRED_AT_ONCE]
            for row in over:
                delete_session(connection, row)
            return [(row.tenant, row.session) for row in over]

        deleted = self._database.write(work)
        for key in deleted:
            self._timelines.forget(key)
        if deleted:
            self._has_words_of_deleted = True
            self._database.wipe()
        return deleted

    def _erase_words(self) -> None:
        """Remove the words of deleted sessions from the search index."""
        if self._has_words_of_deleted:
            self._database.write(erase_words)
            self._database.wipe()
            self._has_words_of_deleted = False

    def _forget_keys(self, before: float) -> None:
        """Drop the idempotency keys of turns that were committed before a time."""
        old = retries.c.created < int(before)
        if self._database.read(lambda connection: connection.execute(sql.select(sql.exists().where(old))).scalar_one()):
            self._database.write(lambda connection: connection.execute(sql.delete(retries).where(old)))
