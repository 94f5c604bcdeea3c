"""Leases: among the servers that share a log, one at a time writes a session.

A lease is a row, and its number, which is never used twice, is the fencing number: what its holder writes is written
only while that very row is there, in the same transaction. It lives as long as its server, which tells that it does by
a row in ``heartbeats``, by the clock of the database: so a session that is held costs nothing while it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, TypeVar

import sqlalchemy as sql
from sqlalchemy.exc import IntegrityError

from server.claims import Key, SessionBusy
from server.database import Database, LogUnavailable
from server.tables import heartbeats, leases
from server.timeline import SessionMoved

T = TypeVar("T")

BEAT_SECONDS = 2.0  # between two heartbeats
DEAD_SECONDS = 10.0  # without one until a server is dead to the others
PATIENCE_SECONDS = 1.0  # at least, for a session that a living server holds; at most until its next heartbeat
FIRST_LOOK, LONGEST_LOOK = 0.02, 0.25  # seconds between two looks at a lease
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


class InThread(Protocol):
    """Runs blocking work on the log's thread."""

    def __call__(self, work: Callable[[], T]) -> Awaitable[T]: ...


@dataclass(frozen=True)
class Holder:
    """A living server that holds a session, with its last heartbeat by the clock of the database."""

    server: str
    beat: float


@dataclass(frozen=True)
class News:
    """What other servers did to sessions that this one holds: took over or deleted those that are ``lost``, and wish
    that the turns of others be ``unwanted``."""

    lost: frozenset[Key] = frozenset()
    unwanted: frozenset[Key] = frozenset()


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

    async def take(self, key: Key, in_thread: InThread, *, force: bool = False) -> bool:
        """Hold a session among the servers; its claim is held. Whether another server held it until then, which only
        ``force`` takes it from while that lives. Raises SessionBusy, once it is known that it does."""
        if not self.shared:
            return False
        begun, pause = time.monotonic(), FIRST_LOOK
        first: Holder | None = None
        while True:
            found = await in_thread(lambda: self._take(key, force))
            if isinstance(found, bool):
                return found
            first = first or found
            if found != first and time.monotonic() - begun >= PATIENCE_SECONDS:
                raise SessionBusy
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_LOOK)

    async def beat(self) -> News:
        """Tell the others that this server lives; what they did meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._heart, self._beat)

    # --- on the log's thread ------------------------------------------------------------------------------

    def begin(self) -> None:
        """The first sign of life. What an earlier life of this server held is free."""
        if self.shared:
            self.database.write(lambda connection: self._forget(connection, alive=True))

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

    def wish_ended(self, key: Key) -> None:
        """Ask whoever holds the session to end its turn."""
        unwanted = sql.update(leases).where(leases.c.name == name_of(key)).values(unwanted=1)
        self.database.write(lambda connection: connection.execute(unwanted))

    def dead(self, connection: sql.Connection) -> sql.ColumnElement[bool] | None:
        """What ``server`` columns of others than living servers fulfil; None where there are no others."""
        if not self.shared:
            return None
        living = sql.select(heartbeats.c.server).where(age(connection.dialect.name) < DEAD_SECONDS)
        return sql.and_(sql.column("server") != self.server, sql.column("server").not_in(living))

    def revoke(self, connection: sql.Connection, key: Key, server: str) -> None:
        """Take a dead server's lease away: should it come back, it writes nothing more."""
        connection.execute(sql.delete(leases).where(leases.c.name == name_of(key), leases.c.server == server))

    # --- within -------------------------------------------------------------------------------------------

    def _row(self, key: Key) -> dict[str, Any] | None:
        """The lease of a session that is held here, as parameters of OF_ROW."""
        number = self._numbers.get(key)
        return None if number is None else {"number": number, "of_name": name_of(key), "of_server": self.server}

    def _take(self, key: Key, force: bool) -> bool | Holder | None:
        """One try. Whether a living server held it; else who does, None: whoever was quicker."""

        def work(connection: sql.Connection) -> bool | Holder:
            hurried(connection)
            found = connection.execute(held(connection.dialect.name), {"of_name": name_of(key)}).one_or_none()
            lives = False
            if found is not None:
                lives = found.server != self.server and found.beat is not None and found.age < DEAD_SECONDS
                if lives and not force:
                    return Holder(found.server, found.beat)
                connection.execute(sql.delete(leases).where(leases.c.id == found.id))
            made = connection.execute(TAKE, {"name": name_of(key), "server": self.server, "unwanted": 0})
            assert made.inserted_primary_key is not None
            numbers.append(made.inserted_primary_key[0])
            return lives

        numbers: list[int] = []
        try:
            outcome = self.database.write(work)
        except IntegrityError:
            return None
        if numbers:
            self._numbers[key] = numbers[-1]
        return outcome

    def _beat(self) -> News:
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
            self.database.write(lambda connection: connection.execute(sql.delete(leases).where(leases.c.id.in_(gone))))
        self._strays = frozenset(strays)
        lost = (key for key, number in before.items() if number != SPENT and number not in rows)
        return News(
            frozenset(key for key in lost if now.get(key) == before[key]),
            frozenset(key_of(row.name) for row in rows.values() if row.unwanted),
        )

    def _forget(self, connection: sql.Connection, alive: bool) -> None:
        connection.execute(sql.delete(leases).where(leases.c.server == self.server))
        connection.execute(sql.delete(heartbeats).where(heartbeats.c.server == self.server))
        if alive:
            now = clock(connection.dialect.name)
            connection.execute(sql.insert(heartbeats).values(server=self.server, beat=now))


@cache
def held(dialect: str) -> sql.Select[Any]:
    """The lease of a session, with the last heartbeat of its server and how long ago that was."""
    columns = leases.c.id, leases.c.server, heartbeats.c.beat, age(dialect).label("age")
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
    """Seconds since a heartbeat."""
    return clock(dialect) - heartbeats.c.beat


def hurried(connection: sql.Connection) -> sql.Connection:
    """A transaction that need not be on the disk when it is over: a lease that is lost is taken again."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SET LOCAL synchronous_commit = off")
    return connection
