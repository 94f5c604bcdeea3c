"""``SessionLog``: opens, cleans up and closes the log, and gives access to its tables.

The truth of every session, in SQLite or PostgreSQL: opened, cleaned up and closed here. The sessions themselves are in
``server.log.session_table``.
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
from server.log.recovery.mending import open_log
from server.log.response_rows import ResponseLog
from server.log.servers import Servers
from server.log.session_locks import SessionLocks
from server.log.session_rows import delete_session
from server.log.session_table import SessionTable, now
from server.log.stored import unexpired
from server.log.tables import ANYONE, ballast, retries, sessions

KEY_SECONDS = 48 * 3600  # that an idempotency key is remembered
EXPIRED_AT_ONCE = 50  # sessions deleted in one transaction


class SessionLog(SessionTable, SessionLocks):
    """The log. All blocking work runs on one thread of its own, so the writes of a server have one order.

    Every method is whole or not at all, and durable when it returns: against the death of the process, with
    ``durability="power"`` also against loss of power. Every method raises LogUnavailable when the database cannot be
    used, a writing one LogFull when that is for want of storage; nothing of it can be seen then. What needs the
    timeline of a session that has lost rows raises SessionDamaged, until the session is deleted. A tenant's session is
    unknown to every other tenant. A session past its TTL is unknown too, also before ``expire`` has removed it.

    The methods that change a session take no claim: the caller holds it. Where several servers share the log, what they
    hold is held against the others too (``server.log.leases``): a change of a session that this server has lost
    meanwhile raises SessionMoved and writes nothing. ``commit`` is the last call under its claim.

    ``expect`` is the ``version`` of the record that the change was made from (0: there was none); if the log has moved
    on since, by another server, SessionMoved is raised and nothing is written. None: whatever is there is changed.
    """

    def __init__(
        self,
        where: Path | str,
        durability: Durability = "process",
        server: str = ANYONE,
        on_unregistered: Callable[[], object] | None = None,
    ) -> None:
        """Open or create the log: a file of SQLite, readable by this user only, or a database URL
        (``postgresql://...``, ``sqlite:///path``), which several servers may share. ``server`` names this one among
        those of a database, also after a restart. Raises LogUnavailable, whose message is one line and names no
        password.

        A file that is damaged is set aside, and the log goes on with what is left of it: see ``salvage``, which is None
        otherwise. ``older``: this is not the log that was here before. ``responses`` and stored ``chats`` are those of
        its sessions. ``on_unregistered`` is called where this server has not used this log before, or so long ago that
        nobody knows what was deleted since: its cache has to be emptied.
        """
        self._database, self.salvage, self.older = open_log(where, durability)
        thread = LogThread(self._database)
        leases = Leases(self._database, server, shared=not isinstance(where, Path))
        SessionTable.__init__(self, self._database, server, leases, thread)
        SessionLocks.__init__(self, leases, thread)
        self._servers = Servers(self._database, server)
        self.responses = ResponseLog(self._database, server, leases, thread)
        self.chats = ChatLog(self._database, server, thread)
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
        """Finish what was begun, free what is still held, and close the database."""
        await super().close()
        self._database.close()

    async def pinned(self, moment: float) -> list[tuple[str, str, int]]:
        """(tenant, session, until) of every session with a pin that holds at a ``moment`` (Unix seconds)."""
        query = sql.select(sessions.c.tenant, sessions.c.session, sessions.c.pinned_until)
        query = query.where(sessions.c.pinned_until > moment, unexpired(moment))
        return await self._thread.read(lambda connection: [(*row,) for row in connection.execute(query)])

    async def expire(self, moment: float) -> list[Key]:
        """Delete every session that is past its TTL at a ``moment`` (Unix seconds) and that nothing holds, in this
        process or at another server, and forget old idempotency keys. The sessions that were deleted, as by
        ``delete``."""
        deleted: list[Key] = []
        while some := await self._thread.run(partial(self._expire_some, self._claims.held(), moment)):
            deleted += some  # a few at a time: turns are committed in between
        await self._thread.run(lambda: self._servers.register(moment))
        await self._thread.run(lambda: self._forget_keys(moment - KEY_SECONDS))
        return deleted

    async def tombstones(self) -> dict[Key, int]:
        """The deleted sessions of which this server's engine may still hold something, whichever server has deleted
        them, each with the life that ended last."""
        return await self._thread.run(self._servers.tombstones)

    async def swept(self, tenant: str, session: str, life: int) -> None:
        """This server's engine holds nothing more of this life of a deleted session, nor of those before."""
        await self._thread.run(lambda: self._servers.swept(tenant, session, life))

    @property
    def full(self) -> bool:
        """Whether the last that was to be written found no room."""
        return self._database.full

    async def writable(self) -> None:
        """Raise LogFull if the log could not be written a moment ago and cannot be written now. Costs nothing while
        all is well."""
        if self._database.full:
            await self._thread.run(lambda: self._database.try_to_write(ballast))

    # --- on the log's thread ------------------------------------------------------------------------------

    def _expire_some(self, held: frozenset[Key], moment: float) -> list[Key]:
        """Delete some sessions past their TTL that neither this process (``held``) nor another server holds; [] when
        there are no more."""

        def work(connection: sql.Connection) -> list[Key]:
            due = sql.select(sessions).where(sessions.c.expires <= int(moment)).order_by(sessions.c.expires)
            rows = connection.execute(due.with_for_update(skip_locked=True)).all()
            busy = held | self._leases.elsewhere(connection) if rows else held
            over = [row for row in rows if (row.tenant, row.session) not in busy][:EXPIRED_AT_ONCE]
            for row in over:
                delete_session(connection, row)
            return [(row.tenant, row.session) for row in over]

        deleted = self._database.write(work)
        for key in deleted:
            self._timelines.forget(key)
        if deleted:
            self._database.wipe()
        return deleted

    def _forget_keys(self, before: float) -> None:
        """Drop the idempotency keys of turns that were committed before a time."""
        old = retries.c.created < int(before)
        if self._database.read(lambda connection: connection.execute(sql.select(sql.exists().where(old))).scalar_one()):
            self._database.write(lambda connection: connection.execute(sql.delete(retries).where(old)))
