"""``Engine``: the interface of the engine in the server process: submit a turn, read its deltas, manage the KV of
sessions. Nothing here depends on processes or sockets.

Exception
+-- EngineUnavailable   no engine takes turns right now: try again in `retry_after` seconds
+-- TurnRefused         the engine looked at this turn and did not admit it
+-- EngineDied          the engine went away while this turn was running
+-- EngineFailed        the model cannot be served at all
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from scheduler.protocol import Delta, Exported, Imported, Inspected, ModelFacts, Receipt, Stats, Submit

State = Literal["loading", "ready", "restarting", "stopping"]


class EngineUnavailable(Exception):
    """No engine takes turns now: it loads, restarts or stops. ``message`` is a sentence for the client;
    ``retry_after`` is in whole seconds, at least 1."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after


class TurnRefused(Exception):
    """The engine did not admit this turn. ``code`` is one of ``scheduler.protocol.Refused``; ``retry_after``
    (seconds) is set when the same turn may be admitted later."""

    def __init__(self, code: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after = retry_after


class EngineDied(Exception):
    """The engine went away in the middle of this turn; what it had generated so far was delivered before.
    ``message`` is a sentence for the client."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class EngineFailed(Exception):
    """The model cannot be served. ``message`` is one line for the person who started the server."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class TurnStream(Protocol):
    """One submitted turn, read by one task. ``receipt``: what its prompt cost, once it is admitted. ``stopped``: it
    is ended on purpose; ``spoke``: it has generated a token.

    ``news`` is set when there is something to look at: the receipt, the end, or ``patience`` deltas. The reader clears
    it, and may put one of its own in its place. ``heard`` is called with each delta as it comes, and must not raise.
    """

    receipt: Receipt | None
    news: asyncio.Event
    patience: int
    heard: Callable[[Delta], None]
    stopped: bool
    spoke: bool

    def take(self) -> Delta | None:
        """What has come since the last call, merged into one delta without receipt, or if that is much the first part
        of it, and ``news`` is set; None where nothing has, and after the one that carries a finish reason. Raises
        TurnRefused or EngineDied once everything before it is taken."""

    def stop(self) -> bool:
        """End the turn on purpose: what it said so far is its reply, behind which comes a delta with the finish reason
        ``cancelled``. False where it has ended already."""

    def cancel(self) -> None:
        """Let the turn go: take it out of the batch if it still runs. Its reader does so at the end of every turn,
        when the answer is written. Idempotent."""


class Engine(Protocol):
    """What answers turns. ``facts`` is None until ready, also while a fresh engine loads after a crash.

    ``inspect``, ``export`` and ``import_`` raise EngineUnavailable when no engine is ready or it neither answers nor
    gets on with its work for minutes, and EngineDied when it goes away meanwhile. While the server drains they are
    answered still.
    """

    facts: ModelFacts | None
    stats: Stats

    @property
    def healthy(self) -> bool:
        """Ready, and the step loop gave a sign of life within the last 30 seconds."""

    def state(self) -> State: ...

    def submit(self, request: Submit) -> TurnStream:
        """Hand a turn to the engine without waiting. Raises EngineUnavailable at once."""

    def turns_away(self, tenant: str) -> TurnRefused | None:
        """What any turn of this tenant would come to now, where that is a full queue."""

    def reading(self, tenant: str) -> AbstractContextManager[None]:
        """Within it, and within tasks that begin there, a request of this tenant is read: it has a place in the queue
        until its turn is submitted."""

    def forget(self, tenant: str, session: str, life: int | None = None) -> None:
        """Drop the KV of a session from every tier; a running turn of it ends as cancelled. Nothing is sent while no
        engine is ready, and an engine may die over it: whoever needs the files gone asks again at the next ready
        engine, until it is told that this ``life`` of the session is forgotten (None: nobody is told)."""

    def cancel(self, tenant: str, session: str) -> bool:
        """Stop the turn of a session that runs or waits, see ``TurnStream.stop``. False where there is none."""

    def end(self, tenant: str, session: str, failure: Exception) -> None:
        """End a running turn of a session, whose KV stays: whoever reads it is raised ``failure``."""

    def pin(self, tenant: str, session: str, until: float) -> None:
        """Evict the KV of a session last until a time (Unix seconds; 0: no longer). An engine forgets its pins when it
        ends: they are sent again to the next one."""

    async def inspect(self, tenant: str, session: str) -> Inspected:
        """Which tier holds what of a session; no tiers at all for one that the engine does not know."""

    async def export(self, tenant: str, session: str, folder: str, token_ids: bytes) -> Exported:
        """Write the KV of a session as files into ``folder``, an absolute path that does not exist yet: as far as it
        is that of the timeline ``token_ids`` (int32), and of nothing else."""

    async def import_(self, tenant: str, session: str, folder: str) -> Imported:
        """Take the files of an export in ``folder`` (an absolute path) as the KV of a session. The engine reads them
        before it answers; the folder remains the caller's."""
