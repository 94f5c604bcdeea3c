"""Leases: exclusive use of sessions among the servers that share a log.

A lease is a row. Its number is the fencing number, which is never used twice: a commit checks in its own transaction
that the row with this number still exists. A lease is valid while its server writes heartbeats (rows in ``heartbeats``,
timed by the database's clock), so holding a session costs no renewals.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import sqlalchemy as sql
from sqlalchemy.exc import IntegrityError

from server.log.claims import Key, SessionBusy
from server.log.database import Database, LogFull, LogLocked, LogUnavailable
from server.log.log_thread import LogThread
from server.log.tables import heartbeats, leases
from server.log.timeline import SessionMoved

BEAT_SECONDS = 2.0  # between two heartbeats
DEAD_SECONDS = 10.0  # without one until a server is dead to the others
PATIENCE_SECONDS = 1.0  # at least, for a session that a living server holds; at most until its next heartbeat
FIRST_LOOK, LONGEST_LOOK = 0.02, 0.25  # seconds between two looks at a lease
OLD_SECONDS = 86400.0  # without a heartbeat until a server is forgotten
WITHOUT_WAITING = "SELECT set_config('synchronous_commit', 'off', true), set_config('lock_timeout', '100ms', true)"
# The statements of every turn are built once: that costs more than to run them.
TAKE = sql.insert(leases)
OF_ROW = sql.and_(
    leases.c.id == sql.bindparam("number"),
    leases.c.name == sql.bindparam("of_name"),
    leases.c.server == sql.bindparam("of_server"),
)
LOCK = sql.select(leases.c.id).where(OF_ROW).with_for_update()
FREE = sql.delete(leases).where(OF_ROW)

RELEASED = 0  # in place of a number: the lease was released in the transaction that it was for


@dataclass(frozen=True)
class Holder:
    """A live server that holds a session, with its last heartbeat by the database's clock."""

    server: str
    beat: float


@dataclass(frozen=True)
class LeaseChanges:
    """What other servers did: ``lost`` are sessions of this server that they took over or deleted, ``unwanted`` are
    responses that they ask this server to cancel: tenant, session, and the response's key.
    """

    lost: frozenset[Key] = frozenset()
    unwanted: frozenset[tuple[str, str, str]] = frozenset()


@dataclass
class Leases:
    """The leases of one server. ``shared``: whether other servers may use the log; if not, leases do nothing. Numbers
    are added and removed on the log's thread only, in the order of the writes.
    """

    database: Database
    server: str
    shared: bool
    _numbers: dict[Key, int] = field(default_factory=dict)  # of what is held now
    _strays: frozenset[int] = frozenset()  # rows of this server's that nobody here holds, at the last heartbeat

    def __post_init__(self) -> None:
        self._heart = ThreadPoolExecutor(max_workers=1, thread_name_prefix="heartbeat")  # a slow commit is no death

    # --- on the event loop --------------------------------------------------------------------------------

    async def take(self, key: Key, thread: LogThread, *, force: bool = False) -> bool:
        """Take the lease of a session whose claim the caller holds. Returns whether another server held it until now;
        from a live server it is taken only with ``force``. Raises SessionBusy once it is certain that the holder is
        alive.
        """
        if not self.shared:
            return False
        begun = since = time.monotonic()
        pause = FIRST_LOOK
        first: Holder | None = None  # as it was when it was first seen, ``since``
        while True:
            dead = first if time.monotonic() - since >= DEAD_SECONDS else None  # whatever the database's clock says
            found = await thread.run(partial(self._take, key, force, dead))
            if isinstance(found, bool):
                return found
            if first is None:
                first, since = found, time.monotonic()
            elif found is not None and found != first and time.monotonic() - begun >= PATIENCE_SECONDS:
                raise SessionBusy
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_LOOK)

    async def beat(self) -> LeaseChanges:
        """Write a heartbeat. Returns what other servers did since the last one."""
        return await asyncio.get_running_loop().run_in_executor(self._heart, self._beat)

    # --- on the log's thread ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Write the first heartbeat. Leases from an earlier run of this server are released, and rows of servers that
        are long dead are removed.
        """
        if self.shared:
            with suppress(LogFull):  # no reason not to start: the heartbeats do it once there is room
                self.database.write(lambda connection: self._forget(connection, alive=True))
            with suppress(LogUnavailable):
                self.database.write(remove_old)

    def end(self) -> None:
        """Release all leases and remove this server's heartbeat."""
        self._heart.shutdown()
        if self.shared:
            with suppress(LogUnavailable, IntegrityError):
                self.database.write(lambda connection: self._forget(connection, alive=False))

    def check(self, connection: sql.Connection, key: Key) -> None:
        """Check in a transaction that this server still holds the session's lease, and lock it until the transaction
        ends. Raises SessionMoved. A session without a lease here is not checked.
        """
        row = self._row(key)
        if row is not None and connection.execute(LOCK, row).one_or_none() is None:
            raise SessionMoved

    def check_and_release(self, connection: sql.Connection, key: Key) -> None:
        """Like ``check``, and release the lease in the same transaction; call ``mark_released`` after the commit.
        Raises SessionMoved.
        """
        row = self._row(key)
        if row is not None and not connection.execute(FREE, row).rowcount:
            raise SessionMoved

    def mark_released(self, key: Key) -> None:
        """The transaction of ``check_and_release`` is committed: nothing more is written under this claim."""
        if key in self._numbers:
            self._numbers[key] = RELEASED

    def release(self, key: Key) -> None:
        """Release the lease of the session, if it is still held. If its row cannot be deleted now, a later heartbeat
        deletes it.
        """
        row = self._row(key)
        number = self._numbers.pop(key, RELEASED)
        if row is not None and number != RELEASED:
            with suppress(LogUnavailable, IntegrityError):
                self.database.write(lambda connection: without_waiting(connection).execute(FREE, row))

    def held_by_others(self, connection: sql.Connection) -> frozenset[Key]:
        """The sessions that other live servers hold."""
        if not self.shared:
            return frozenset()
        query = sql.select(leases.c.name).join(heartbeats, heartbeats.c.server == leases.c.server)
        query = query.where(leases.c.server != self.server, age(connection.dialect.name) < DEAD_SECONDS)
        return frozenset(key_of(name) for name in connection.execute(query).scalars())

    def held_by(self, connection: sql.Connection, name: Any, server: Any) -> sql.Exists:
        """SQL condition: a live server, or this one, holds a session; name and server may be columns."""
        living = sql.select(heartbeats.c.server).where(age(connection.dialect.name) < DEAD_SECONDS)
        lives = sql.or_(leases.c.server == self.server, leases.c.server.in_(living))
        return sql.exists().where(leases.c.name == name, leases.c.server == server, lives)

    def is_held_elsewhere(self, connection: sql.Connection, key: Key, server: str) -> bool:
        """Whether another live server holds the session, so that a response it runs there can still complete."""
        if server == self.server:
            return False
        return bool(connection.execute(sql.select(self.held_by(connection, name_of(key), server))).scalar())

    def request_end(self, connection: sql.Connection, key: Key, response: str) -> None:
        """Ask the server that holds the session to end the response with this key."""
        connection.execute(sql.update(leases).where(leases.c.name == name_of(key)).values(unwanted=response))

    def revoke(self, connection: sql.Connection, key: Key, server: str) -> None:
        """Delete another server's lease, so that this server can write nothing more if it comes back."""
        if server != self.server:
            connection.execute(sql.delete(leases).where(leases.c.name == name_of(key), leases.c.server == server))

    # --- within -------------------------------------------------------------------------------------------

    def _row(self, key: Key) -> dict[str, Any] | None:
        """The lease of a session that is held here, as parameters of OF_ROW."""
        number = self._numbers.get(key)
        return None if number is None else {"number": number, "of_name": name_of(key), "of_server": self.server}

    def _take(self, key: Key, force: bool, dead: Holder | None) -> bool | Holder | None:
        """One try. Whether a living server held it; else who does, None: a transaction that is not over. ``dead``: who
        has not been heard of for long enough."""

        def work(connection: sql.Connection) -> bool | Holder:
            without_waiting(connection)
            found = connection.execute(holder_query(connection.dialect.name), {"of_name": name_of(key)}).one_or_none()
            lives = False
            if found is not None:
                holder = Holder(found.server, found.beat)
                lives = found.server != self.server and found.beat is not None and found.age < DEAD_SECONDS
                lives = lives and holder != dead
                if lives and not force:
                    return holder
                connection.execute(sql.delete(leases).where(leases.c.id == found.id))
            made = connection.execute(TAKE, {"name": name_of(key), "server": self.server})
            assert made.inserted_primary_key is not None
            numbers.append(made.inserted_primary_key[0])
            return lives

        numbers: list[int] = []
        try:
            outcome = self.database.write(work)
        except (IntegrityError, LogLocked):
            return None
        if numbers:
            self._numbers[key] = numbers[-1]
        return outcome

    def _beat(self) -> LeaseChanges:
        """Blocking, on the thread of heartbeats."""

        def work(connection: sql.Connection) -> Mapping[int, Any]:
            now = clock(connection.dialect.name)
            alive = sql.update(heartbeats).where(heartbeats.c.server == self.server).values(beat=now)
            if not without_waiting(connection).execute(alive).rowcount:
                connection.execute(sql.insert(heartbeats).values(server=self.server, beat=now))
            rows = connection.execute(sql.select(leases).where(leases.c.server == self.server)).all()
            return {row.id: row for row in rows}

        before = self._numbers.copy()
        rows = self.database.write(work)
        now = self._numbers.copy()
        strays = rows.keys() - {*before.values(), *now.values()}
        if gone := strays & self._strays:  # not such as are just being noted
            free = sql.delete(leases).where(leases.c.id.in_(gone))
            self.database.write(lambda connection: without_waiting(connection).execute(free))
        self._strays = frozenset(strays)
        lost = (key for key, number in before.items() if number != RELEASED and number not in rows)
        return LeaseChanges(
            frozenset(key for key in lost if now.get(key) == before[key]),
            frozenset((*key_of(row.name), row.unwanted) for row in rows.values() if row.unwanted is not None),
        )

    def _forget(self, connection: sql.Connection, alive: bool) -> None:
        connection.execute(sql.delete(leases).where(leases.c.server == self.server))
        connection.execute(sql.delete(heartbeats).where(heartbeats.c.server == self.server))
        if alive:
            now = clock(connection.dialect.name)
            connection.execute(sql.insert(heartbeats).values(server=self.server, beat=now))


@cache
def holder_query(dialect: str) -> sql.Select[Any]:
    """A query for the lease of a session, its server's last heartbeat and that heartbeat's age."""
    columns = leases.c.id, leases.c.server, heartbeats.c.beat, (clock(dialect) - heartbeats.c.beat).label("age")
    query = sql.select(*columns).outerjoin(heartbeats, heartbeats.c.server == leases.c.server)
    return query.where(leases.c.name == sql.bindparam("of_name")).with_for_update(of=leases)


def name_of(key: Key) -> str:
    """A session as one unique column; the separator cannot occur in tenants or session ids."""
    return "/".join(key)


def key_of(name: str) -> Key:
    """The inverse of ``name_of``."""
    tenant, _, session = name.partition("/")
    return tenant, session


def clock(dialect: str) -> sql.ColumnElement[float]:
    """Seconds by the clock of the database."""
    if dialect == "postgresql":
        return sql.cast(sql.extract("epoch", sql.func.clock_timestamp()), sql.Double)
    return (sql.func.julianday("now") - 2440587.5) * 86400.0


def age(dialect: str) -> sql.ColumnElement[float]:
    """Seconds between now and a heartbeat, as an absolute value: the clock may have been set back."""
    return sql.func.abs(clock(dialect) - heartbeats.c.beat)


def without_waiting(connection: sql.Connection) -> sql.Connection:
    """On PostgreSQL, sets the transaction to commit without waiting for the disk (a lost lease can be taken again), and
    to raise LogLocked instead of waiting for locked rows.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(WITHOUT_WAITING)
    return connection


def remove_old(connection: sql.Connection) -> None:
    """Delete the heartbeats of servers that have been dead for a day, and leases of servers without a heartbeat."""
    without_waiting(connection).execute(sql.delete(heartbeats).where(age(connection.dialect.name) > OLD_SECONDS))
    connection.execute(sql.delete(leases).where(leases.c.server.not_in(sql.select(heartbeats.c.server))))
