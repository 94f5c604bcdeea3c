"""The servers that share a log, and the tombstones that each of them has not yet processed."""

from __future__ import annotations

import sqlalchemy as sql
from sqlalchemy.exc import IntegrityError

from server.log.claims import Key
from server.log.database import Database, LogFull
from server.log.tables import ANYONE, servers, tombstones

SEEN_SECONDS = 86400  # between two signs of life
AWAY_SECONDS = 30 * 86400  # that tombstones are kept for a server which does not come back


class Servers:
    """The servers' table and this server's tombstones. Blocking; used on the log's thread only. ``now`` is Unix
    seconds.
    """

    def __init__(self, database: Database, server: str) -> None:
        self._database = database
        self._server = server

    def is_registered(self) -> bool:
        """Whether this server has tombstones for everything that was deleted: it is registered, or it can take over the
        registration that an upgrade left.
        """
        return self._database.read(lambda c: last_seen(c, self._server) is not None or last_seen(c, ANYONE) is not None)

    def register(self, now: float) -> None:
        """Register this server, or renew its registration, at most once a day."""
        known = self._database.read(lambda connection: last_seen(connection, self._server))
        if known is not None and known > now - SEEN_SECONDS:
            return
        try:
            self._database.write(lambda connection: register(connection, self._server, now))
        except IntegrityError:  # it has registered itself meanwhile, under the same name
            return
        except LogFull:
            if known is None:
                raise

    def tombstones(self) -> dict[Key, int]:
        """Deleted sessions that this server has not yet ``swept``, each with the life that ended last."""
        columns = tombstones.c.tenant, tombstones.c.session, tombstones.c.life
        query = sql.select(*columns).where(tombstones.c.server == self._server)
        return self._database.read(
            lambda connection: {(row.tenant, row.session): row.life for row in connection.execute(query)}
        )

    def swept(self, tenant: str, session: str, life: int) -> None:
        """Delete this server's tombstone, unless it now stands for a later life."""
        query = sql.delete(tombstones).where(tombstones.c.tenant == tenant, tombstones.c.session == session)
        query = query.where(tombstones.c.server == self._server, tombstones.c.life == life)
        self._database.write(lambda connection: connection.execute(query))


def last_seen(connection: sql.Connection, server: str) -> int | None:
    """When a server was last registered, in Unix seconds; None if it is unknown."""
    found: int | None = connection.execute(sql.select(servers.c.seen).where(servers.c.id == server)).scalar()
    return found


def register(connection: sql.Connection, server: str, now: float) -> None:
    """Register a server. A new one takes over the tombstones of ``ANYONE``; servers that have been away for too long
    lose their registration and tombstones.
    """
    if last_seen(connection, server) is None:
        connection.execute(sql.delete(servers).where(servers.c.id == ANYONE))
        connection.execute(sql.insert(servers).values(id=server, seen=int(now)))
        connection.execute(sql.update(tombstones).where(tombstones.c.server == ANYONE).values(server=server))
    connection.execute(sql.update(servers).where(servers.c.id == server).values(seen=int(now)))
    connection.execute(sql.delete(servers).where(servers.c.seen < int(now) - AWAY_SECONDS))
    connection.execute(sql.delete(tombstones).where(tombstones.c.server.not_in(sql.select(servers.c.id))))
