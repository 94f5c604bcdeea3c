"""``Engine``: the interface of the engine in the server process: submit a turn, read its deltas, manage the KV of
sessions. Nothing here depends on processes or sockets.

    Exception
    +-- EngineUnavailable   no engine takes turns now: retry in `retry_after` seconds
    +-- TurnRefused         the engine did not admit this turn
    +-- EngineDied          the engine died while this turn was running
    +-- EngineFailed        the model cannot be served at all
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from scheduler.model_facts import ModelFacts
from scheduler.protocol import Delta, Exported, Imported, Inspected, Receipt, Stats, Submit, Warm

State = Literal["loading", "ready", "restarting", "stopping"]


class EngineUnavailable(Exception):
    """No engine takes turns now: it is loading, restarting or stopping. ``message`` is a sentence for the client;
    ``retry_after`` is in whole seconds, at least 1.
    """

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
    """The engine died while this turn was running; the deltas generated before were delivered. ``message`` is a
    sentence for the client.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class EngineFailed(Exception):
    """The model cannot be served. ``message`` is one line for the person who started the server."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class TurnStream(Protocol):
    """One submitted turn, read by one task. ``receipt`` is set when the turn is admitted. ``stopped``: ``stop`` was
    called; ``spoke``: a token has been generated. ``news`` is an event that is set when the receipt, the end, or
    ``patience`` deltas have come. The reader clears it, and may replace it by an event of its own. ``heard`` is called
    with each delta as it comes, and must not raise.
    """

    receipt: Receipt | None
    news: asyncio.Event
    patience: int
    heard: Callable[[Delta], None]
    stopped: bool
    spoke: bool

    def take(self) -> Delta | None:
        """The deltas since the last call, merged into one without receipt. If they are many, the first part of them,
        and ``news`` is set again. None if there are none, and after the delta with a finish reason. Raises TurnRefused
        or EngineDied once everything before it has been taken.
        """

    def stop(self) -> bool:
        """End the turn early and keep what it has generated; a last delta with the finish reason ``cancelled`` follows.
        False if the turn has ended already.
        """

    def cancel(self) -> None:
        """Drop the turn: remove it from the batch if it still runs. Readers call this at the end of every turn, when
        the answer is written. Idempotent.
        """


class Engine(Protocol):
    """Runs turns. ``facts`` is None until the engine is ready, also while a new one loads after a crash.

    ``inspect``, ``export`` and ``import_`` raise EngineUnavailable if no engine is ready, or if it neither answers nor
    makes progress for minutes, and EngineDied if it dies meanwhile. They still work while the server drains.
    """

    facts: ModelFacts | None
    stats: Stats

    @property
    def healthy(self) -> bool:
        """Whether the engine is ready and its step loop has sent a message within the last 30 seconds."""

    def state(self) -> State: ...

    def submit(self, request: Submit) -> TurnStream:
        """Send a turn to the engine without waiting. Raises EngineUnavailable."""

    def turns_away(self, tenant: str) -> TurnRefused | None:
        """The refusal that a turn of this tenant would get now because the queue is full; None if it would be
        queued.
        """

    def reading(self, tenant: str) -> AbstractContextManager[None]:
        """A context manager: within it, and in tasks started there, a request of this tenant that is still being read
        has a place in the queue until its turn is submitted.
        """

    def forget(self, tenant: str, session: str, life: int | None = None) -> None:
        """Drop the KV of a session from every tier; a running turn of it ends as cancelled. Nothing is sent while no
        engine is ready, and the engine may die before it is done: a caller that needs the files removed repeats this
        with each new engine until it is told that this ``life`` of the session is forgotten (None: nobody is told).
        """

    def cancel(self, tenant: str, session: str) -> bool:
        """Stop the running or waiting turn of a session, see ``TurnStream.stop``. False if there is none."""

    def end(self, tenant: str, session: str, failure: Exception) -> None:
        """End a running turn of a session and keep its KV: its reader gets the exception ``failure``."""

    def pin(self, tenant: str, session: str, until: float) -> None:
        """Evict the KV of a session last, until a time (Unix seconds; 0: unpin). An engine loses its pins when it ends:
        they are sent again to the next one.
        """

    def await_tools(self, turn: str, tools: Sequence[str]) -> None:
        """The turn of that id has ended with calls of these tools, whose results the next request will bring: its KV is
        kept for as long as they usually take.
        """

    def warm(self, announced: Warm) -> None:
        """A request is announced: its KV is brought to the device if there is room."""

    async def inspect(self, tenant: str, session: str) -> Inspected:
        """What each tier holds of a session; no tiers for a session that the engine does not know."""

    async def export(self, tenant: str, session: str, folder: str, token_ids: bytes) -> Exported:
        """Write the KV of a session as files into ``folder``, an absolute path that does not exist yet. Only KV that
        matches the timeline ``token_ids`` (int32) is written.
        """

    async def import_(self, tenant: str, session: str, folder: str) -> Imported:
        """Load the files of an export in ``folder`` (an absolute path) as the KV of a session. The engine has read them
        when it answers; the caller removes the folder.
        """
