"""Quotas: how many sessions and bytes the tenant of a key may keep.

The quota of a request's key is a context variable of its task, as sessions begin in many places. It is looked at before
a turn is computed and before a session is created: requests that run at the same time can pass it by as many.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

import sqlalchemy as sql

from server.errors import ApiError
from server.log.log_thread import LogThread
from server.log.stored import is_unexpired
from server.log.tables import media, responses, sessions, turns

PATIENCE = 20  # times as long as it took to add up a tenant's bytes, they are not added up again


@dataclass(frozen=True)
class Quota:
    """The most ``sessions`` and ``bytes`` that a tenant may keep, as one of its keys says; None: no limit."""

    sessions: int | None = None
    bytes: int | None = None

    def __bool__(self) -> bool:
        return self.sessions is not None or self.bytes is not None


NO_QUOTA = Quota()
_quota: ContextVar[Quota] = ContextVar("quota", default=NO_QUOTA)


def begin_quota(quota: Quota) -> None:
    _quota.set(quota)


def current_quota() -> Quota:
    return _quota.get()


class QuotaReached(ApiError):
    """429 with OpenAI's code for a quota; a client that tries it again gets the same."""

    def __init__(self, what: str) -> None:
        message = f"This key's tenant may keep {what}: delete some, or wait until some expire."
        super().__init__(
            429,
            message,
            code="insufficient_quota",
            kind="insufficient_quota",
            headers={"x-should-retry": "false"},  # OpenAI's clients repeat a 429 otherwise
        )


class Holdings:
    """What tenants keep in the log: the bytes of their sessions' rows, stored responses and media. ``beside`` tells the
    bytes of a tenant that are kept elsewhere.
    """

    def __init__(self, thread: LogThread) -> None:
        self.beside: Callable[[str], int] = lambda tenant: 0
        self._thread = thread
        self._measured: dict[str, tuple[float, int]] = {}  # the bytes, and until when they are taken for true

    async def check(self, tenant: str, *, begins: bool, more: int = 0) -> None:
        """Raises QuotaReached if the request's quota does not allow ``more`` bytes, or any, or with ``begins`` a
        further session. Raises LogUnavailable.
        """
        quota = current_quota()
        if begins and quota.sessions is not None and await self.sessions(tenant) >= quota.sessions:
            raise QuotaReached(f"{quota.sessions} sessions")
        if quota.bytes is not None and await self.bytes(tenant) + max(more, 1) > quota.bytes:
            raise QuotaReached(f"{quota.bytes} bytes")

    async def sessions(self, tenant: str) -> int:
        count = sql.select(sql.func.count()).select_from(sessions)
        query = count.where(sessions.c.tenant == tenant, is_unexpired(time.time()))
        return int(await self._thread.read(lambda connection: connection.execute(query).scalar_one()))

    async def bytes(self, tenant: str) -> int:
        """How many bytes of the tenant are kept, without indexes; as of some time ago where the log has many."""
        until, size = self._measured.get(tenant, (0.0, 0))
        if time.monotonic() < until:
            return size + self.beside(tenant)
        size, seconds = await self._thread.read(lambda connection: measure_bytes(connection, tenant))
        self._measured[tenant] = time.monotonic() + PATIENCE * seconds, size
        return size + self.beside(tenant)


def measure_bytes(connection: sql.Connection, tenant: str) -> tuple[int, float]:
    """The bytes of a tenant, and in how many seconds they were added up."""
    began = time.perf_counter()
    return measure(connection, tenant), time.perf_counter() - began


def measure(connection: sql.Connection, tenant: str) -> int:
    """Add up the bytes of a tenant. It reads all texts of the tenant."""
    of_tenant = sessions.c.tenant == tenant
    rows = sum_of(connection, turns.c.tokens, turns.c.messages)
    kept = sql.select(rows).join_from(turns, sessions).where(of_tenant)
    answers = sum_of(connection, responses.c.body, responses.c.inputs, responses.c.events)
    stored = sql.select(answers).join_from(responses, sessions).where(of_tenant)
    shown = sql.select(sum_of(connection, media.c.data)).where(media.c.name.startswith(f"{tenant}/", autoescape=True))
    return sum(int(connection.execute(query).scalar_one() or 0) for query in (kept, stored, shown))


def sum_of(connection: sql.Connection, *columns: sql.Column[object]) -> sql.ColumnElement[int]:
    """SQL: the bytes of these columns in all rows."""
    if connection.dialect.name == "postgresql":
        sizes = [sql.func.octet_length(column) for column in columns]
    else:  # whose length of a text is in characters
        sizes = [sql.func.length(sql.cast(column, sql.LargeBinary)) for column in columns]
    total: sql.ColumnElement[int] = sql.func.sum(sum((sql.func.coalesce(size, 0) for size in sizes), sql.literal(0)))
    return total
