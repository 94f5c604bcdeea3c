"""``Engine``: the interface of the engine in the server process: submit a turn, read its deltas, manage the KV of
sessions. Nothing here depends on processes or sockets.

    Exception
    +-- EngineUnavailable   no engine takes turns now: retry in `retry_after` seconds
    +-- TurnRefused         the engine did not admit this turn
    +-- EngineDied          the engine died while this turn was running
    +-- EngineFailed        the model cannot be served at all
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from scheduler.adapter_messages import AdapterLoaded
from scheduler.engine_stats import Stats
from scheduler.model_facts import ModelFacts
from scheduler.pooling_messages import Pooled, PoolInput
from scheduler.protocol import Delta, Expanded, Exported, Imported, Inspected, MediaItem, Submit, Warm
from scheduler.speech_messages import Transcribe, Transcribed
from scheduler.tokenizer_parts import TokenizerParts
from scheduler.turn_receipt import Receipt
from server.engine.news import News

State = Literal["loading", "ready", "restarting", "stopping"]


SHUTTING_DOWN = "The server is shutting down."
WHY_NOT: dict[State, str] = {  # no turn can be submitted
    "loading": "The model is still loading.",
    "ready": "The engine is not taking requests right now.",
    "restarting": "The engine is restarting.",
    "stopping": SHUTTING_DOWN,
}


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
    news: News
    patience: int
    heard: Callable[[Delta, float | None], None]
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

    ``inspect``, ``expand``, ``export`` and ``import_`` raise EngineUnavailable if no engine is ready, or if it neither
    answers nor makes progress for minutes, and EngineDied if it dies meanwhile. They still work while the server
    drains.
    """

    @property
    def facts(self) -> ModelFacts | None: ...

    @property
    def stats(self) -> Stats: ...

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

    async def expand(self, tenant: str, media: Sequence[MediaItem]) -> Expanded:
        """By what pictures are replaced in prompts of this tenant. Raises what ``inspect`` raises."""

    async def transcribe(self, window: Transcribe) -> Transcribed:
        """What is said in a window of sound. Raises what ``inspect`` raises; it waits as long as the engine hears
        others.
        """

    async def pool(self, tenant: str, inputs: Sequence[PoolInput], spare: bool = False) -> Pooled:
        """The vectors of these inputs, of an engine whose model embeds or scores; ``spare``: others go first. Whoever
        is cancelled meanwhile takes them out of its queue. Raises what ``submit`` and ``inspect`` raise, and
        TurnRefused.
        """

    async def export(self, tenant: str, session: str, folder: str, token_ids: bytes) -> Exported:
        """Write the KV of a session as files into ``folder``, an absolute path that does not exist yet. Only KV that
        matches the timeline ``token_ids`` (int32) is written.
        """

    async def import_(self, tenant: str, session: str, folder: str) -> Imported:
        """Load the files of an export in ``folder`` (an absolute path) as the KV of a session. The engine has read them
        when it answers; the caller removes the folder.
        """


class LoadableEngine(Engine, Protocol):
    """An engine with its life: ``prepare``, ``start``, ``wait_ready``, and at the end ``stop``."""

    @property
    def in_hand(self) -> int:
        """Turns that run, or have ended but whose answer is still being committed and written."""

    def prepare(self) -> None:
        """Start the process, which imports its modules and reads no file of the model or of KV until ``start``."""

    async def start(self) -> None:
        """Begin to load the model."""

    async def wait_ready(self) -> ModelFacts:
        """The facts of the first load. Raises EngineFailed when the model cannot be served."""

    async def tokenizer(self) -> TokenizerParts | None:
        """The tokenizer of the first load, as soon as it has been read; None if there is none to hand over."""

    async def load_adapter(self, name: str, folder: str) -> AdapterLoaded:
        """Load the adapter in a folder (an absolute path) under a name, also in engines that come after a crash. Raises
        what ``inspect`` raises.
        """

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; turns that run with it go on."""

    def drain(self) -> None:
        """Refuse new turns; running turns and other calls go on."""

    async def stop(self, flush: float = 0.0, grace: float = 5.0) -> None:
        """End every turn now, and the engine within about ``flush + grace`` seconds. Idempotent."""

    def kill(self) -> None:
        """End the engine at once."""
