"""The durable log: who a session is, and exactly which tokens and messages it holds.

The truth of every session, in SQLite or PostgreSQL. What a session holds is the fold of its rows
(``server.log.timeline``); how rows are read and written is in ``server.log.ledger``.
"""

from __future__ import annotations

import builtins
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec import UNSET, UnsetType

from server.log.chat_rows import ChatLog
from server.log.claims import Key
from server.log.database import Durability, LogFull
from server.log.leases import Leases
from server.log.ledger import Ledger
from server.log.listing import SessionFamily, SessionFilter, SessionPage
from server.log.portable import PortableLog
from server.log.recovery.mending import opened
from server.log.response_rows import ResponseLog, TurnExtras
from server.log.retries import CommittedTurn, Idempotency
from server.log.servers import Servers
from server.log.session_locks import SessionLocks
from server.log.tables import ANYONE, ballast
from server.log.timeline import (
    Message,
    SessionRecord,
    SessionSummary,
    TurnRecord,
)

KEY_SECONDS = 48 * 3600  # that an idempotency key is remembered


class SessionLog(SessionLocks):
    """The log. All blocking work runs on one thread of its own, so the writes of a server have one order.

    Every verb is whole or not at all, and durable when it returns: against the death of the process, with
    ``durability="power"`` also against loss of power. Every verb raises LogUnavailable when the database cannot be
    used, a writing one LogFull when that is for want of storage; nothing of it can be seen then. What needs the
    timeline of a session that has lost rows raises SessionDamaged, until the session is deleted. A tenant's session is
    unknown to every other tenant. A session past its TTL is unknown too, also before ``expire`` has removed it.

    The verbs that change a session take no claim: the caller holds it. Where several servers share the log, what they
    hold is held against the others too (``server.log.leases``); a verb on a session that this server has lost meanwhile
    raises SessionMoved and writes nothing. ``commit`` is the last verb under its claim.

    ``expect`` is the ``version`` of the record that the change was made from (0: there was none); if the log has moved
    on since, by another server, SessionMoved is raised and nothing is written. None: whatever is there is changed.
    """

    def __init__(
        self,
        where: Path | str,
        durability: Durability = "process",
        server: str = ANYONE,
        stranger: Callable[[], object] | None = None,
    ) -> None:
        """Open or create the log: a file of SQLite, readable by this user only, or a database URL
        (``postgresql://...``, ``sqlite:///path``), which several servers may share. ``server`` names this one among
        those of a database, also after a restart. Raises LogUnavailable, whose message is one line and names no
        password.

        A file that is damaged is set aside, and the log goes on with what is left of it: see ``salvage``, which is None
        otherwise. ``older``: this is not the log that was here before. ``responses`` and stored ``chats`` are those of
        its sessions.
        ``stranger`` is called where this server has not used this log before, or so long ago that nobody knows what was
        deleted since: its cache has to be emptied.
        """
        self._database, self.salvage, self.older = opened(where, durability)
        super().__init__(Leases(self._database, server, shared=not isinstance(where, Path)))
        self._ledger = Ledger(self._database, server, self._leases)
        self._servers = Servers(self._database, server)
        try:
            self._leases.begin()
            if stranger is not None and not self._servers.is_known():
                stranger()
            self._servers.register(now())
            self.responses = ResponseLog(self._database, server, self._leases, self._in_thread)
            self.chats = ChatLog(self._database, server, self._in_thread)
            with suppress(LogFull):  # no reason not to start: whoever looks for one tells so then
                self.responses.fail_unfinished()
        except BaseException:
            self._database.close()
            raise

    async def close(self) -> None:
        """Finish what was begun and close the database."""
        await super().close()
        self._database.close()

    # --- reading ------------------------------------------------------------------------------------------

    async def get(self, tenant: str, session: str) -> SessionRecord | None:
        """The session as of its last row, by whatever model; None if it is unknown."""
        return await self._in_thread(lambda: self._ledger.get(tenant, session, now()))

    async def summary(self, tenant: str, session: str) -> SessionSummary | None:
        """The same without its text, read without folding its rows."""
        return await self._in_thread(lambda: self._ledger.summary(tenant, session, now()))

    async def list(
        self,
        tenant: str,
        *,
        limit: int,
        after: str | None = None,
        descending: bool = True,
        metadata: Mapping[str, str] | None = None,
        prefix: str | None = None,
        used_after: int | None = None,
        used_before: int | None = None,
    ) -> SessionPage:
        """``limit`` sessions in order of last use, the last one first if ``descending``, behind the session ``after``.

        Only those that have all of ``metadata``, whose id starts with ``prefix``, and that were last used at or after
        ``used_after`` and before ``used_before`` (Unix seconds). Raises UnknownSession if ``after`` is unknown.
        """
        chosen = SessionFilter(metadata or {}, prefix, used_after, used_before)
        return await self._in_thread(lambda: self._ledger.page(tenant, chosen, limit, after, descending, now()))

    async def family(self, tenant: str, session: str) -> SessionFamily:
        """The session with what it was forked from, and all that was forked from these. Raises UnknownSession."""
        return await self._in_thread(lambda: self._ledger.family(tenant, session, now()))

    async def replay(self, tenant: str, session: str, key: str) -> CommittedTurn | None:
        """The turn that was committed under an idempotency key, also when it is not the last one any more; None if
        there is none. A key is remembered for two days, or as long as its session."""
        return await self._in_thread(lambda: self._ledger.replay(tenant, session, key, now()))

    async def rows(self, tenant: str, session: str) -> PortableLog:
        """The current timeline and its turns, to be moved to another server. Raises UnknownSession."""
        return await self._in_thread(lambda: self._ledger.export(tenant, session, now()))

    async def pinned(self, moment: float) -> builtins.list[tuple[str, str, int]]:
        """(tenant, session, until) of every session with a pin that holds at a ``moment`` (Unix seconds)."""
        return await self._in_thread(lambda: self._ledger.pinned(moment))

    # --- changing -----------------------------------------------------------------------------------------

    async def commit(
        self,
        tenant: str,
        session: str,
        *,
        tokens: Sequence[int],
        messages: Sequence[Message],
        prompt_tokens: int | None = None,
        fingerprint: str,
        finish_reason: str,
        cached: int = 0,
        receipt: str | None = None,
        idempotency: Idempotency | None = None,
        beside: TurnExtras | None = None,
        expect: int | None = None,
    ) -> TurnRecord:
        """Make this whole timeline the session's, as one more turn; the session begins here if it is unknown.

        The reply begins at ``prompt_tokens`` (None: not known) and is the last of ``messages``, which are kept as they
        are and must not be changed afterwards. Where the timeline leaves the logged one, what is common is kept, and
        the turns that end behind that are dropped. Raises SessionMoved, also if a turn of this idempotency key is
        committed already, and where ``expect`` is not 0 and the session was deleted meanwhile. What is ``beside`` the
        turn is written with it, and so is its ``receipt`` (TurnRecord).
        """
        ids = array("i", tokens)
        begins = len(ids) if prompt_tokens is None else prompt_tokens
        return await self._in_thread(
            lambda: self._ledger.commit(
                tenant,
                session,
                ids,
                [*messages],
                begins,
                cached=cached,
                fingerprint=fingerprint,
                finish_reason=finish_reason,
                receipt=receipt,
                idempotency=idempotency,
                beside=beside or TurnExtras(),
                expect=expect,
                now=now(),
            )
        )

    async def create(
        self,
        tenant: str,
        session: str,
        *,
        messages: Sequence[Message] = (),
        metadata: Mapping[str, str] | None = None,
        ttl: int | None = None,
        pinned_until: int | None = None,
    ) -> SessionSummary:
        """Begin a session. Its ``messages`` are unrendered; with a ``ttl`` it ends that many seconds after the last
        change of its timeline. Raises SessionExists."""
        return await self._in_thread(
            lambda: self._ledger.create(tenant, session, [*messages], dict(metadata or {}), ttl, pinned_until, now())
        )

    async def update(
        self,
        tenant: str,
        session: str,
        *,
        metadata: Mapping[str, str] | UnsetType = UNSET,
        ttl: int | UnsetType | None = UNSET,
        pinned_until: int | UnsetType | None = UNSET,
    ) -> SessionSummary:
        """Set what is given and leave the rest. ``metadata`` replaces all pairs, a ``ttl`` counts from now. Its
        timeline, ``used`` and ``version`` stay as they are, so no claim is needed. Raises UnknownSession."""
        return await self._in_thread(lambda: self._ledger.update(tenant, session, metadata, ttl, pinned_until, now()))

    async def fork(self, tenant: str, session: str, new: str, *, turn: int | None = None) -> SessionSummary:
        """Begin ``new`` as a copy of ``session`` up to the end of a turn (0: empty; None: all of it), with its
        metadata and TTL. Raises UnknownSession, SessionExists, NoSuchPlace("turn")."""
        return await self._in_thread(lambda: self._ledger.fork(tenant, session, new, turn, now()))

    async def rewind(
        self,
        tenant: str,
        session: str,
        *,
        turn: int | None = None,
        tokens: int | None = None,
        reply: Message | None = None,
        expect: int | None = None,
    ) -> SessionSummary:
        """Back to the end of a turn (0: empty), or to a token: see ``locate`` for where that ends, and give what is
        left of the ``reply`` that is cut there. One of ``turn`` and ``tokens``. Raises UnknownSession, SessionMoved,
        NoSuchPlace."""
        if (turn is None) == (tokens is None):
            raise ValueError("a rewind goes to a turn or to a token")
        return await self._in_thread(lambda: self._ledger.rewind(tenant, session, turn, tokens, reply, expect, now()))

    async def edit(
        self, tenant: str, session: str, index: int, content: str, *, expect: int | None = None
    ) -> SessionSummary:
        """Another content for message ``index``; everything behind it is dropped. The tokens go back to the end of
        the last reply before it, what is behind that is unrendered. Raises UnknownSession, SessionMoved,
        NoSuchPlace("index")."""
        return await self._in_thread(lambda: self._ledger.edit(tenant, session, index, content, expect, now()))

    async def revise(
        self, tenant: str, session: str, keep: int, messages: Sequence[Message], *, expect: int | None = None
    ) -> SessionSummary:
        """Make ``messages`` those that follow the first ``keep`` ones. The tokens go back to the end of the last reply
        before, what is behind that is unrendered; where nothing is left out that was answered, they stay. Raises
        UnknownSession, SessionMoved, NoSuchPlace("index")."""
        kept = [*messages]
        return await self._in_thread(lambda: self._ledger.revise(tenant, session, keep, kept, expect, now()))

    async def restore(
        self,
        tenant: str,
        session: str,
        log: PortableLog,
        *,
        metadata: Mapping[str, str] | None = None,
        ttl: int | None = None,
    ) -> SessionSummary:
        """Begin a session with a timeline that ``rows`` gave. Its tokens mean something only to a model of
        ``log.fingerprint``; a turn under another one renders the messages anew. Raises SessionExists, InvalidLog."""
        return await self._in_thread(
            lambda: self._ledger.restore(tenant, session, log, dict(metadata or {}), ttl, now())
        )

    # --- the end of a session -----------------------------------------------------------------------------

    async def delete(self, tenant: str, session: str) -> int | None:
        """Remove the session and all its rows; None if it is unknown. A tombstone stays until ``swept``. The id may
        be used again, and begins empty: which of its *lives* ended here."""
        return await self._in_thread(lambda: self._ledger.delete(tenant, session, now()))

    async def expire(self, moment: float) -> builtins.list[tuple[str, str]]:
        """Delete every session that is past its TTL at a ``moment`` (Unix seconds) and that nothing holds, in this
        process or at another server, and forget old idempotency keys. The sessions that were deleted, as by
        ``delete``."""
        deleted: builtins.list[tuple[str, str]] = []
        while some := await self._in_thread(partial(self._ledger.expire, self._claims.held(), moment)):
            deleted += some  # a few at a time: turns are committed in between
        await self._in_thread(lambda: self._servers.register(moment))
        await self._in_thread(lambda: self._ledger.forget_keys(moment - KEY_SECONDS))
        return deleted

    async def tombstones(self) -> dict[Key, int]:
        """The deleted sessions of which this server's engine may still hold something, whichever server has deleted
        them, each with the life that ended last."""
        return await self._in_thread(self._servers.tombstones)

    async def swept(self, tenant: str, session: str, life: int) -> None:
        """This server's engine holds nothing more of this life of a deleted session, nor of those before."""
        await self._in_thread(lambda: self._servers.swept(tenant, session, life))

    @property
    def full(self) -> bool:
        """Whether the last that was to be written found no room."""
        return self._database.full

    async def writable(self) -> None:
        """Raise LogFull if the log could not be written a moment ago and cannot be written now. Costs nothing while
        all is well."""
        if self._database.full:
            await self._in_thread(lambda: self._database.try_to_write(ballast))


def now() -> float:
    """Unix seconds."""
    return time.time()
