"""Usage per key and day: what the turns of each API key have cost, in a table that servers of one log add to."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from datetime import UTC, date, datetime
from functools import partial
from typing import NamedTuple

import sqlalchemy as sql
from sqlalchemy.exc import IntegrityError

from server.log.database import Database, LogUnavailable
from server.log.log_thread import LogThread
from server.log.tables import key_usage

WRITE_SECONDS = 1.0  # at most, from the end of a turn until its usage is in the log

logger = logging.getLogger("warmturn.sessions")


class Spent(NamedTuple):
    """What some turns have cost: ``requests``; tokens of prompts that were computed (``new``) and ``reused``, and
    ``generated`` ones; ``seconds`` from the admission of each turn to its end, added up.
    """

    requests: int = 0
    new: int = 0
    reused: int = 0
    generated: int = 0
    seconds: float = 0.0

    def plus(self, other: Spent) -> Spent:
        """The sum of both."""
        return Spent(
            self.requests + other.requests,
            self.new + other.new,
            self.reused + other.reused,
            self.generated + other.generated,
            self.seconds + other.seconds,
        )


class DayOfKey(NamedTuple):
    """A day (UTC, as ``2026-11-25``) of a tenant's key, which is told by its id; "" where no key is needed."""

    tenant: str
    key: str
    day: str


class UsageLog:
    """Usage is collected in memory and written every second, so that a turn waits for no further write: a crash loses
    the usage of the last second. What cannot be written now is written later.
    """

    def __init__(self, database: Database, thread: LogThread) -> None:
        self._database = database
        self._thread = thread
        self._new: dict[DayOfKey, Spent] = {}
        self._failed: deque[dict[DayOfKey, Spent]] = deque()  # filled by the log's thread
        self._timer: asyncio.TimerHandle | None = None

    def add(self, tenant: str, key: str, spent: Spent) -> None:
        """Count what a turn has cost that ends now. Called on the event loop."""
        self._count(DayOfKey(tenant, key, today()), spent)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WRITE_SECONDS, self.write_soon)

    def write_soon(self) -> None:
        """Have all that was collected written by the log's thread."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._failed:
            for place, spent in self._failed.popleft().items():
                self._count(place, spent)
        if self._new:
            self._thread.submit(partial(self._write, self._new))
            self._new = {}

    def _count(self, place: DayOfKey, spent: Spent) -> None:
        self._new[place] = self._new.get(place, Spent()).plus(spent)

    async def days(self, tenant: str, first: str, last: str) -> list[tuple[DayOfKey, Spent]]:
        """The usage of a tenant's keys from the day ``first`` to ``last``, in their order. Raises LogUnavailable."""
        self.write_soon()
        within = key_usage.c.tenant == tenant, key_usage.c.day.between(first, last)
        query = sql.select(key_usage).where(*within).order_by(key_usage.c.day, key_usage.c.key)
        rows = await self._thread.read(lambda connection: connection.execute(query).all())
        return [(DayOfKey(*row[:3]), Spent(*row[3:])) for row in rows]

    def _write(self, collected: dict[DayOfKey, Spent]) -> None:
        """Add to the table. On the log's thread."""
        try:
            try:
                self._database.write(partial(add_usage, [*collected.items()]))
            except IntegrityError:  # another server has just inserted one of the rows
                self._database.write(partial(add_usage, [*collected.items()]))
        except (LogUnavailable, IntegrityError):
            self._failed.append(collected)  # the log tells of that itself
        except BaseException:
            logger.exception("usage could not be written")


# Made once: bound values of new expressions are in cycles, and this is written every second.
_ADDITION = (
    sql.update(key_usage)
    .where(*(key_usage.c[name] == sql.bindparam(f"of_{name}") for name in DayOfKey._fields))
    .values({name: key_usage.c[name] + sql.bindparam(f"more_{name}") for name in Spent._fields})
)


def add_usage(days: Sequence[tuple[DayOfKey, Spent]], connection: sql.Connection) -> None:
    """Add to the rows of these days, in the caller's transaction."""
    for place, spent in days:
        of, more = place._asdict(), spent._asdict()
        bound = {f"of_{name}": value for name, value in of.items()}
        bound |= {f"more_{name}": value for name, value in more.items()}
        if connection.execute(_ADDITION, bound).rowcount == 0:
            connection.execute(sql.insert(key_usage).values({**of, **more}))


def today() -> str:
    """The day now, UTC."""
    return datetime.now(UTC).date().isoformat()


def day_of(text: str) -> date:
    """A day as it is written in the table. Raises ValueError."""
    return date.fromisoformat(text)
