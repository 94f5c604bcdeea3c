"""Links to branches: who has a link's secret may read a session up to one of its turns. The secret is not kept."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sql

from server.log.log_thread import LogThread
from server.log.session_rows import find_session, require_session
from server.log.tables import sessions, shares

MOST = 100  # links of one session


class TooManyShares(Exception):
    """The session has as many links as it may have."""


@dataclass(frozen=True)
class Share:
    """A link to ``session`` up to the turn ``turn``, whose id is ``mark``; after another change of the branch before
    that turn it leads nowhere. Times are Unix seconds.
    """

    digest: str
    tenant: str
    session: str
    turn: int
    mark: str
    created: int
    expires: int


def digest_of(secret: str) -> str:
    """What is kept of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


OF_SESSION = sql.select(
    shares.c.digest,
    sessions.c.tenant,
    sessions.c.session,
    shares.c.turn,
    shares.c.mark,
    shares.c.created,
    shares.c.expires,
).join_from(shares, sessions)


class ShareLog:
    """The links of sessions; they are deleted with their session. Methods raise what those of ``SessionLog`` raise."""

    def __init__(self, thread: LogThread) -> None:
        self._thread = thread

    async def add(self, share: Share) -> None:
        """Note a link. Raises UnknownSession, TooManyShares."""

        def work(connection: sql.Connection) -> None:
            row = require_session(find_session(connection, share.tenant, share.session, time.time(), lock=True))
            connection.execute(sql.delete(shares).where(shares.c.expires <= share.created))
            of_session = sql.select(sql.func.count()).where(shares.c.session_id == row.id)
            if connection.execute(of_session).scalar_one() >= MOST:
                raise TooManyShares
            values = {"turn": share.turn, "mark": share.mark, "created": share.created, "expires": share.expires}
            connection.execute(sql.insert(shares).values(digest=share.digest, session_id=row.id, **values))

        await self._thread.write(work)

    async def of_session(self, tenant: str, session: str) -> Sequence[Share]:
        """The links of a session that have not expired, oldest first. Raises UnknownSession."""

        def work(connection: sql.Connection) -> list[Share]:
            row = require_session(find_session(connection, tenant, session, time.time()))
            wanted = OF_SESSION.where(shares.c.session_id == row.id, shares.c.expires > int(time.time()))
            found = connection.execute(wanted.order_by(shares.c.created, shares.c.digest))
            return [Share(*row) for row in found]

        return await self._thread.read(work)

    async def revoke(self, tenant: str, session: str, beginning: str) -> bool:
        """Delete the link of a session whose digest begins so; False if there is none. Raises UnknownSession."""

        def work(connection: sql.Connection) -> bool:
            row = require_session(find_session(connection, tenant, session, time.time(), lock=True))
            wanted = shares.c.session_id == row.id, sql.func.substr(shares.c.digest, 1, len(beginning)) == beginning
            return connection.execute(sql.delete(shares).where(*wanted)).rowcount > 0

        return await self._thread.write(work)

    async def find(self, secret: str) -> Share | None:
        """The link with this secret, unless it has expired; None if there is none."""
        wanted = OF_SESSION.where(shares.c.digest == digest_of(secret), shares.c.expires > int(time.time()))
        row = await self._thread.read(lambda connection: connection.execute(wanted).one_or_none())
        return None if row is None else Share(*row)
