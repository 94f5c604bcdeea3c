"""The durable log: who a session is, and exactly which tokens and messages it holds.

A session is a row in ``sessions``; its timeline is what its rows in ``turns`` fold to, in order: keep so many tokens
and messages of what was there, then append these. So turn boundaries, edits and rewinds stay readable, and a turn
writes its own tokens only.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sql
from sqlalchemy.exc import SQLAlchemyError

from scheduler.messages import unpack_ids

T = TypeVar("T")
Message = dict[str, Any]

FORMAT = 1  # of the tables below
REMEMBERED = 256  # sessions whose folded timeline stays in memory


class SessionBusy(Exception):
    """A turn of this session is running."""


class LogUnavailable(Exception):
    """The log cannot be read or written now (disk full, damaged, another format). ``message`` names no path."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@dataclass(frozen=True)
class SessionRecord:
    """A session as of its last committed turn. ``tokens`` are ids of the tokenizer that ``fingerprint`` stands for;
    ``created`` is in Unix seconds."""

    id: str
    tokens: list[int]
    messages: list[Message]
    fingerprint: str
    created: int


@dataclass
class _Timeline:
    """The folded rows of one session, up to turn number ``turns``. ``row`` is its key in ``sessions``."""

    row: int
    created: int
    turns: int = 0
    fingerprint: str = ""
    tokens: array[int] = field(default_factory=lambda: array("i"))
    messages: list[Message] = field(default_factory=list)


_metadata = sql.MetaData()

_format = sql.Table("log_format", _metadata, sql.Column("version", sql.Integer, nullable=False))

_sessions = sql.Table(
    "sessions",
    _metadata,
    sql.Column("id", sql.Integer, primary_key=True),  # never used twice, so that a deleted session stays deleted
    sql.Column("tenant", sql.String(128), nullable=False),
    sql.Column("session", sql.String(128), nullable=False),
    sql.Column("created", sql.BigInteger, nullable=False),
    sql.UniqueConstraint("tenant", "session"),
    sqlite_autoincrement=True,
)

_turns = sql.Table(
    "turns",
    _metadata,
    sql.Column("session_id", sql.ForeignKey("sessions.id"), primary_key=True),
    sql.Column("number", sql.Integer, primary_key=True),  # 1, 2, 3... within the session
    sql.Column("keep_tokens", sql.Integer, nullable=False),
    sql.Column("tokens", sql.LargeBinary, nullable=False),  # int32, see scheduler.messages.unpack_ids
    sql.Column("keep_messages", sql.Integer, nullable=False),
    sql.Column("messages", sql.Text, nullable=False),  # a JSON array
    sql.Column("fingerprint", sql.String(128), nullable=False),
    sql.Column("finish_reason", sql.String(32), nullable=False),
    sql.Column("created", sql.BigInteger, nullable=False),
)


class SessionLog:
    """The log in one SQLite file. All blocking work runs on one thread of its own, so writes have one order.

    A commit is whole or not at all, and durable against the death of the process when ``commit`` returns.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the log at ``path``, readable by this user only. Raises LogUnavailable."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="session-log")
        self._claimed: set[tuple[str, str]] = set()
        self._timelines: OrderedDict[tuple[str, str], _Timeline] = OrderedDict()
        self._engine = sql.create_engine(sql.URL.create("sqlite", database=str(path)))
        sql.event.listen(self._engine, "connect", _set_pragmas)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            with self._engine.begin() as connection:
                _create(connection)
        except (SQLAlchemyError, OSError) as error:
            self._engine.dispose()
            raise LogUnavailable(f"the session log cannot be opened: {_reason(error)}") from error
        except LogUnavailable:
            self._engine.dispose()
            raise

    async def get(self, tenant: str, session: str) -> SessionRecord | None:
        """The session as last committed, by whatever model, or None. Its messages must not be changed.
        Raises LogUnavailable."""
        return await self._in_thread(lambda: self._get(tenant, session))

    async def commit(
        self,
        tenant: str,
        session: str,
        *,
        tokens: list[int],
        messages: list[Message],
        fingerprint: str,
        finish_reason: str,
    ) -> None:
        """Make this whole timeline the session's, as one more turn; the session begins here if it is unknown.

        The messages are kept as they are and must not be changed afterwards. Raises LogUnavailable.
        """
        ids = array("i", tokens)
        await self._in_thread(lambda: self._commit(tenant, session, ids, list(messages), fingerprint, finish_reason))

    @contextmanager
    def claim(self, tenant: str, session: str) -> Iterator[None]:
        """Hold the session for one turn. Raises SessionBusy if another turn of this process holds it."""
        key = tenant, session
        if key in self._claimed:
            raise SessionBusy
        self._claimed.add(key)
        try:
            yield
        finally:
            self._claimed.remove(key)

    async def close(self) -> None:
        """Finish what was begun and close the file."""
        await asyncio.to_thread(self._thread.shutdown)
        self._engine.dispose()

    # --- on the log's thread ------------------------------------------------------------------------------

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            # Shielded: a client that leaves must not cut a commit off from its result.
            return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work))
        except SQLAlchemyError as error:
            raise LogUnavailable(f"the session log failed: {_reason(error)}") from error

    def _get(self, tenant: str, session: str) -> SessionRecord | None:
        with self._engine.connect() as connection:
            timeline = self._read(connection, tenant, session)
        if timeline is None or timeline.turns == 0:
            return None
        return SessionRecord(
            session, timeline.tokens.tolist(), list(timeline.messages), timeline.fingerprint, timeline.created
        )

    def _commit(
        self, tenant: str, session: str, tokens: array[int], messages: list[Message], fingerprint: str, reason: str
    ) -> None:
        now = int(time.time())
        with self._engine.begin() as connection:
            timeline = self._read(connection, tenant, session)
            if timeline is None:
                made = connection.execute(sql.insert(_sessions).values(tenant=tenant, session=session, created=now))
                assert made.inserted_primary_key is not None
                timeline = _Timeline(row=made.inserted_primary_key[0], created=now)
            keep_tokens = common_prefix(timeline.tokens, tokens)
            keep_messages = common_prefix(timeline.messages, messages)
            connection.execute(
                sql.insert(_turns).values(
                    session_id=timeline.row,
                    number=timeline.turns + 1,
                    keep_tokens=keep_tokens,
                    tokens=tokens[keep_tokens:].tobytes(),
                    keep_messages=keep_messages,
                    messages=json.dumps(messages[keep_messages:], ensure_ascii=False, separators=(",", ":")),
                    fingerprint=fingerprint,
                    finish_reason=reason,
                    created=now,
                )
            )
        self._remember(
            (tenant, session),
            _Timeline(timeline.row, timeline.created, timeline.turns + 1, fingerprint, tokens, messages),
        )

    def _read(self, connection: sql.Connection, tenant: str, session: str) -> _Timeline | None:
        """The timeline as the database has it: what is remembered of it, and the turns since."""
        row = connection.execute(
            sql.select(_sessions.c.id, _sessions.c.created).where(
                _sessions.c.tenant == tenant, _sessions.c.session == session
            )
        ).one_or_none()
        if row is None:
            return None
        known = self._timelines.get((tenant, session))
        if known is None or known.row != row.id:
            known = _Timeline(row.id, row.created)
        newer = sql.select(_turns).where(_turns.c.session_id == row.id, _turns.c.number > known.turns)
        for turn in connection.execute(newer.order_by(_turns.c.number)):
            del known.tokens[turn.keep_tokens :]
            del known.messages[turn.keep_messages :]
            known.tokens.extend(unpack_ids(turn.tokens))
            known.messages.extend(json.loads(turn.messages))
            known.turns, known.fingerprint = turn.number, turn.fingerprint
        self._remember((tenant, session), known)
        return known

    def _remember(self, key: tuple[str, str], timeline: _Timeline) -> None:
        self._timelines[key] = timeline
        self._timelines.move_to_end(key)
        if len(self._timelines) > REMEMBERED:
            self._timelines.popitem(last=False)


def common_prefix(old: Sequence[Any], new: Sequence[Any]) -> int:
    """How many items two sequences of one type share from the start. Halving keeps the comparison in C."""
    low, high = 0, min(len(old), len(new))  # old[:low] == new[:low] always
    if old[:high] == new[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if old[low:middle] == new[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _create(connection: sql.Connection) -> None:
    """Make the tables of a new log, or see that those of an old one are ours."""
    _metadata.create_all(connection)
    version = connection.execute(sql.select(_format.c.version)).scalar_one_or_none()
    if version is None:
        connection.execute(sql.insert(_format).values(version=FORMAT))
    elif version != FORMAT:
        raise LogUnavailable(f"the session log has format {version}; this version of warmturn reads format {FORMAT}")


def _set_pragmas(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON", "busy_timeout = 5000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _reason(error: Exception) -> str:
    """The database's or the system's own words, without statement, values or path."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(getattr(error, "orig", None) or type(error).__name__)
