"""Leases: exclusive use of sessions among the servers that share a log.

A lease is a row, and its number, which is never used twice, is the fencing number: what its holder writes is written
only while that very row is there, in the same transaction. It lives as long as its server, which tells that it does by
a row in ``heartbeats``, by the clock of the database: so a session that is held costs nothing while it is.
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
HURRY = "SELECT set_config('synchronous_commit', 'off', true), set_config('lock_timeout', '100ms', true)"
# The statements of every turn are built once: that costs more than to run them.
TAKE = sql.insert(leases)
OF_ROW = sql.and_(
    leases.c.id == sql.bindparam("number"),
    leases.c.name == sql.bindparam("of_name"),
    leases.c.server == sql.bindparam("of_server"),
)
LOCK = sql.select(leases.c.id).where(OF_ROW).with_for_update()
FREE = sql.delete(leases).where(OF_ROW)

SPENT = 0  # in place of a number: what the lease was for is written, and it is gone


@dataclass(frozen=True)
class Holder:
    """A living server that holds a session, with its last heartbeat by the clock of the database."""

    server: str
    beat: float


@dataclass(frozen=True)
class LeaseChanges:
    """What other servers did: took over or deleted sessions that this one held, which are ``lost``, and wish that it
    ends responses that are ``unwanted``: tenant, session, and the response's key."""

    lost: frozenset[Key] = frozenset()
    unwanted: frozenset[tuple[str, str, str]] = frozenset()


@dataclass
class Leases:
    """The leases of one server. ``shared`` is whether others may use the log; if not, nothing here costs anything.

    Numbers are noted and struck out on the log's thread only, in the order in which rows are written.
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
        """Hold a session among the servers; its claim is held. Whether another server held it until then, which only
        ``force`` takes it from while that lives. Raises SessionBusy, once it is known that it does."""
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
        """Tell the others that this server lives; what they did meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._heart, self._beat)

    # --- on the log's thread ------------------------------------------------------------------------------

    def begin(self) -> None:
        """The first sign of life. What an earlier life of this server held is free, and what is left of servers that
        do not come back is removed."""
        if self.shared:
            with suppress(LogFull):  # no reason not to start: the heartbeats do it once there is room
                self.database.write(lambda connection: self._forget(connection, alive=True))
            with suppress(LogUnavailable):
                self.database.write(remove_old)

    def end(self) -> None:
        """The last one: what was still held is free."""
        self._heart.shutdown()
        if self.shared:
            with suppress(LogUnavailable, IntegrityError):
                self.database.write(lambda connection: self._forget(connection, alive=False))

    def check(self, connection: sql.Connection, key: Key) -> None:
        """Within a transaction: that nobody else may write the session until its end. Raises SessionMoved. A session
        that is not held here is not checked."""
        row = self._row(key)
        if row is not None and connection.execute(LOCK, row).one_or_none() is None:
            raise SessionMoved

    def spend(self, connection: sql.Connection, key: Key) -> None:
        """The same, and let go of it by this very transaction; ``spent`` follows."""
        row = self._row(key)
        if row is not None and not connection.execute(FREE, row).rowcount:
            raise SessionMoved

    def spent(self, key: Key) -> None:
        """The transaction was written: nothing more is written under this claim."""
        if key in self._numbers:
            self._numbers[key] = SPENT

    def let_go(self, key: Key) -> None:
        """Free the session, if it is still held. A row that cannot be removed now goes with a later heartbeat."""
        row = self._row(key)
        number = self._numbers.pop(key, SPENT)
        if row is not None and number != SPENT:
            with suppress(LogUnavailable, IntegrityError):
                self.database.write(lambda connection: hurried(connection).execute(FREE, row))

    def elsewhere(self, connection: sql.Connection) -> frozenset[Key]:
        """The sessions that other servers hold, which live."""
        if not self.shared:
            return frozenset()
        query = sql.select(leases.c.name).join(heartbeats, heartbeats.c.server == leases.c.server)
        query = query.where(leases.c.server != self.server, age(connection.dialect.name) < DEAD_SECONDS)
        return frozenset(key_of(name) for name in connection.execute(query).scalars())

    def held_by(self, connection: sql.Connection, name: Any, server: Any) -> sql.Exists:
        """As a condition: a server, this one or one that lives, holds a session; both may be columns."""
        living = sql.select(heartbeats.c.server).where(age(connection.dialect.name) < DEAD_SECONDS)
        lives = sql.or_(leases.c.server == self.server, leases.c.server.in_(living))
        return sql.exists().where(leases.c.name == name, leases.c.server == server, lives)

    def is_run(self, connection: sql.Connection, key: Key, server: str) -> bool:
        """Whether another server, that lives, holds the session: what it runs there can still end well."""
        if server == self.server:
            return False
        return bool(connection.execute(sql.select(self.held_by(connection, name_of(key), server))).scalar())

    def wish_ended(self, connection: sql.Connection, key: Key, response: str) -> None:
        """Ask whoever holds the session to end a response, which has this key, and nothing else."""
        connection.execute(sql.update(leases).where(leases.c.name == name_of(key)).values(unwanted=response))

    def revoke(self, connection: sql.Connection, key: Key, server: str) -> None:
        """Take another server's lease away: should that come back, it writes nothing more."""
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
            hurried(connection)
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
            if not hurried(connection).execute(alive).rowcount:
                connection.execute(sql.insert(heartbeats).values(server=self.server, beat=now))
            rows = connection.execute(sql.select(leases).where(leases.c.server == self.server)).all()
            return {row.id: row for row in rows}

        before = self._numbers.copy()
        rows = self.database.write(work)
        now = self._numbers.copy()
        strays = rows.keys() - {*before.values(), *now.values()}
        if gone := strays & self._strays:  # not such as are just being noted
            free = sql.delete(leases).where(leases.c.id.in_(gone))
            self.database.write(lambda connection: hurried(connection).execute(free))
        self._strays = frozenset(strays)
        lost = (key for key, number in before.items() if number != SPENT and number not in rows)
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
    """The lease of a session, with the last heartbeat of its server and how long ago that was."""
    columns = leases.c.id, leases.c.server, heartbeats.c.beat, (clock(dialect) - heartbeats.c.beat).label("age")
    query = sql.select(*columns).outerjoin(heartbeats, heartbeats.c.server == leases.c.server)
    return query.where(leases.c.name == sql.bindparam("of_name")).with_for_update(of=leases)


def name_of(key: Key) -> str:
    """A session as the one column that is unique; neither part has the character between them."""
    return "/".join(key)


def key_of(name: str) -> Key:
    """The session again."""
    tenant, _, session = name.partition("/")
    return tenant, session


def clock(dialect: str) -> sql.ColumnElement[float]:
    """Seconds by the clock of the database."""
    if dialect == "postgresql":
        return sql.cast(sql.extract("epoch", sql.func.clock_timestamp()), sql.Double)
    return (sql.func.julianday("now") - 2440587.5) * 86400.0


def age(dialect: str) -> sql.ColumnElement[float]:
    """Seconds between now and a heartbeat, which is ahead of now where the clock was set back."""
    return sql.func.abs(clock(dialect) - heartbeats.c.beat)


def hurried(connection: sql.Connection) -> sql.Connection:
    """A transaction that need not be on the disk when it is over, as a lease that is lost is taken again; and does not
    wait for rows, as somebody behind it would: it raises LogLocked."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(HURRY)
    return connection


def remove_old(connection: sql.Connection) -> None:
    """Remove the heartbeats of servers that have been dead for a day, and leases of servers without any."""
    hurried(connection).execute(sql.delete(heartbeats).where(age(connection.dialect.name) > OLD_SECONDS))
    connection.execute(sql.delete(leases).where(leases.c.server.not_in(sql.select(heartbeats.c.server))))
