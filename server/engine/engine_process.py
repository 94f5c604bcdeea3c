"""``EngineProcess``: implements ``Engine`` over an engine process, which is restarted when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from scheduler.adapter_messages import AdapterLoaded, LoadAdapter, UnloadAdapter
from scheduler.engine_config import AdapterSource, EngineConfig
from scheduler.engine_stats import Stats
from scheduler.model_facts import ModelFacts
from scheduler.pooling_messages import Pooled, PoolInput
from scheduler.protocol import (
    AwaitTools,
    Cancel,
    Expand,
    Expanded,
    Export,
    Exported,
    Forget,
    Forgotten,
    FromEngine,
    Import,
    Imported,
    Inspect,
    Inspected,
    Loading,
    MediaItem,
    ModelFailed,
    Pin,
    Ready,
    Refused,
    StepOutputs,
    Submit,
    TokenizerRead,
    Warm,
)
from scheduler.speech_messages import Transcribe, Transcribed
from scheduler.tokenizer_parts import TokenizerParts
from server.engine.engine import SHUTTING_DOWN, WHY_NOT, EngineUnavailable, State, TurnRefused
from server.engine.engine_calls import A, EngineCalls, Question, progress_of
from server.engine.engine_link import EngineLink, LinkFull
from server.engine.engine_turns import EngineTurns
from server.engine.launcher import EngineLauncher, backoff
from server.engine.mailbox import Mailbox
from server.engine.model_loading import ModelLoading
from server.engine.pooling_calls import PoolingCalls
from server.engine.waiting import RequestReading

SILENCE_LIMIT = 30.0  # seconds without a message until the engine counts as hung
STABLE_LIFE = 60.0  # seconds of service after which a death is an accident, not a pattern
LAST_NEWS = 1.0  # seconds for an engine that was told to end to say what has become of its turns

logger = logging.getLogger("warmturn.engine")


class EngineProcess:
    """Implements ``Engine`` over an engine process.

    Invariants: at most one process lives; ``facts`` is set exactly while the state is "ready" (or "stopping" after
    it); every turn in ``_turns`` was sent to the living process and has not ended. All methods belong to the
    event loop that called ``start``.
    """

    facts: ModelFacts | None
    stats: Stats

    def __init__(
        self,
        config: EngineConfig,
        launcher: EngineLauncher,
        *,
        on_loading: Callable[[str], None] | None = None,
        on_ready: Callable[[ModelFacts], None] | None = None,
        on_forgotten: Callable[[str, str, int], None] | None = None,
    ) -> None:
        """``config.address`` is set anew for each process. ``on_loading`` is called with each stage of each load;
        ``on_ready`` for each engine that becomes ready, once turns may be submitted; ``on_forgotten`` with tenant,
        session and life of each forgotten session. They are called on the event loop and must not raise.
        """
        self.facts = None
        self.stats = Stats()
        self._config = config
        self._launcher = launcher
        self._on_loading = on_loading or (lambda stage: logger.info("engine: %s", stage))
        self._on_ready = on_ready or (lambda facts: None)
        self._on_forgotten = on_forgotten or (lambda tenant, session, life: None)
        self._state: State = "loading"
        self._ending = False  # the process was told to end, or will not come any more
        self._turns = EngineTurns(config.max_queued, self._cancel)
        self._calls = EngineCalls()
        self._pooling = PoolingCalls(self._cancel)
        self._link: EngineLink | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._loading = ModelLoading()
        self._last_message = time.monotonic()
        self._folder: Path | None = None  # of the socket, until the engine is connected

    # --- Engine -------------------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        """Whether the engine is ready and has sent a message within the last ``SILENCE_LIMIT`` seconds."""
        return self.state() == "ready" and time.monotonic() - self._last_message < SILENCE_LIMIT

    def state(self) -> State:
        """See ``State``. Not "ready" once the process has ended, also while its last messages are still being read."""
        gone = self._link is None or not self._link.alive
        return "restarting" if self._state == "ready" and gone else self._state

    def submit(self, request: Submit) -> Mailbox:
        """See ``Engine``. Raises ``EngineUnavailable``."""
        if self._link is None or self.state() != "ready":
            raise EngineUnavailable(WHY_NOT[self.state()], self._loading.retry_after)
        assert request.turn not in self._turns, f"turn {request.turn} is running already"
        try:
            self._link.send(request)
        except LinkFull:
            raise EngineUnavailable(WHY_NOT["ready"], self._loading.retry_after) from None
        return self._turns.add(request)

    def turns_away(self, tenant: str) -> TurnRefused | None:
        return self._turns.turns_away(tenant, self.stats.waiting)

    def reading(self, tenant: str) -> RequestReading:
        return self._turns.reading(tenant)

    def forget(self, tenant: str, session: str, life: int | None = None) -> None:
        if self._link is not None and self.facts is not None:
            self._link.send_later(Forget(tenant, session, life))

    def cancel(self, tenant: str, session: str) -> bool:
        return self._turns.cancel(tenant, session)

    def end(self, tenant: str, session: str, failure: Exception) -> None:
        self._turns.end(tenant, session, failure)

    def pin(self, tenant: str, session: str, until: float) -> None:
        if self._link is not None and self.facts is not None:
            self._link.send_later(Pin(tenant, session, until))

    def await_tools(self, turn: str, tools: Sequence[str]) -> None:
        if self._link is not None and self.facts is not None:
            self._link.send_later(AwaitTools(turn, tuple(tools)))

    def warm(self, announced: Warm) -> None:
        if self._link is not None and self.facts is not None:
            self._link.send_later(announced)

    async def inspect(self, tenant: str, session: str) -> Inspected:
        return await self._ask(Inspect(uuid.uuid4().hex, tenant, session), Inspected)

    async def expand(self, tenant: str, media: Sequence[MediaItem]) -> Expanded:
        return await self._ask(Expand(uuid.uuid4().hex, tenant, tuple(media)), Expanded)

    async def transcribe(self, window: Transcribe) -> Transcribed:
        return await self._ask(window, Transcribed)

    async def export(self, tenant: str, session: str, folder: str, token_ids: bytes) -> Exported:
        return await self._ask(Export(uuid.uuid4().hex, tenant, session, folder, token_ids), Exported)

    async def import_(self, tenant: str, session: str, folder: str) -> Imported:
        return await self._ask(Import(uuid.uuid4().hex, tenant, session, folder), Imported)

    async def pool(self, tenant: str, inputs: Sequence[PoolInput], spare: bool = False) -> Pooled:
        """See ``Engine``. Raises ``EngineUnavailable``."""
        if self.state() != "ready":
            raise EngineUnavailable(WHY_NOT[self.state()], self._loading.retry_after)
        return await self._pooling.ask(tenant, inputs, spare, lambda question: self._ask(question, Pooled))

    async def load_adapter(self, name: str, folder: str) -> AdapterLoaded:
        answer = await self._ask(LoadAdapter(uuid.uuid4().hex, name, folder), AdapterLoaded)
        if answer.facts is not None:
            self._config = self._config.with_adapter(AdapterSource(name, folder, needed=False))
        return answer

    def unload_adapter(self, name: str) -> None:
        self._config = self._config.without_adapter(name)
        if self._link is not None and self.facts is not None:
            self._link.send_later(UnloadAdapter(name))

    async def _ask(self, question: Question, kind: type[A]) -> A:
        link = self._link
        if link is None or self.facts is None or not link.alive or self._ending:
            raise EngineUnavailable(WHY_NOT[self.state()], self._loading.retry_after)
        try:
            return await self._calls.ask(question, kind, link.send, self._progress)
        except LinkFull:
            raise EngineUnavailable(WHY_NOT["ready"], self._loading.retry_after) from None

    def _progress(self) -> object:
        return progress_of(self.stats, self._config.kv_folder)

    @property
    def running(self) -> int:
        return len(self._turns)

    @property
    def in_hand(self) -> int:
        """See ``LoadableEngine``; requests for embeddings and scores count as well."""
        return self._turns.in_hand + len(self._pooling)

    # --- life ---------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Start the first engine process and the task that supervises it. The process imports its modules; it reads no
        file of the model or of KV until ``start``.
        """
        assert self._supervisor is None, "started twice"
        self._supervisor = asyncio.create_task(self._supervise())
        self._supervisor.add_done_callback(self._on_supervisor_end)

    async def start(self) -> None:
        """Begin to load the model, in the process that ``prepare`` has started, or in a new one."""
        if self._supervisor is None:
            self.prepare()
        self._loading.allow()

    async def wait_ready(self) -> ModelFacts:
        """The facts of the first load. Raises EngineFailed when the model cannot be served."""
        return await self._loading.facts()

    async def tokenizer(self) -> TokenizerParts | None:
        """The tokenizer of the first load, as soon as the engine has read it; None if it hands over none, or failed."""
        return await self._loading.tokenizer()

    def drain(self) -> None:
        """Refuse new turns; running turns and other calls go on."""
        self._state = "stopping"

    async def stop(self, flush: float = 0.0, grace: float = 5.0) -> None:
        """End every turn now and the process within about ``flush + grace`` seconds; it is not restarted. The engine
        has ``flush`` seconds to write KV to disk; one that is still loading is ended at once. Turns that the engine
        refuses or finishes within ``LAST_NEWS`` get that result. Idempotent.
        """
        self.drain()
        self._ending = True
        self._loading.allow()  # the supervisor waits for nothing but the end of the process
        if self._link is not None:
            stopping = asyncio.create_task(self._link.stop(*((flush, grace) if self.facts is not None else (0.0, 0.0))))
            if self._turns:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._turns.wait_empty(), LAST_NEWS)
            self._end_turns(SHUTTING_DOWN)  # their clients need not wait for the disk
            await stopping
        elif self._supervisor is not None:
            self._supervisor.cancel()
        self._end_turns(SHUTTING_DOWN)
        if self._supervisor is not None:
            await asyncio.wait((self._supervisor,))

    def kill(self) -> None:
        """Kill the process, for a server that exits without waiting."""
        self.drain()
        self._ending = True
        if self._link is not None:
            self._link.kill()

    async def _supervise(self) -> None:
        """One process after the other until told to stop, or until the very first one could not load."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        deaths = 0
        try:
            while True:
                lived = await self._run(context)
                if self._state == "stopping" or not self._loading.is_over:
                    return
                self._state = "restarting"
                deaths = 0 if lived > STABLE_LIFE else deaths + 1
                await asyncio.sleep(backoff(deaths))
        finally:
            context.destroy(linger=0)

    def _on_supervisor_end(self, supervisor: asyncio.Task[None]) -> None:
        """No engine will come any more: whoever waits for one must hear it."""
        self._ending = True
        self._end_turns(SHUTTING_DOWN)
        self._loading.end()
        if not supervisor.cancelled() and (error := supervisor.exception()) is not None:
            logger.critical("the engine is no longer supervised", exc_info=error)

    async def _run(self, context: zmq.Context[zmq.Socket[bytes]]) -> float:
        """One process from start to end; the seconds for which it served."""
        self._loading.begin()
        self._last_message = time.monotonic()
        folder = self._folder = Path(tempfile.mkdtemp(prefix="warmturn-"))  # for this user only
        config = msgspec.structs.replace(self._config, address=f"ipc://{folder}/engine")
        try:
            link = self._link = EngineLink.start(config, self._launcher, context)
        except (OSError, zmq.ZMQError) as error:
            self._loading.failure = f"the engine process could not be started: {error.strerror}"
            shutil.rmtree(folder, ignore_errors=True)
            return 0.0
        ready_since: float | None = None
        try:
            link.configure(config)
            await self._loading.wait_allowed()
            if not self._ending:
                link.load()
            async with contextlib.aclosing(link.messages()) as messages:
                async for message in messages:
                    self._last_message = time.monotonic()
                    if self._folder is not None:  # the engine is connected: even kill -9 leaves nothing behind now
                        shutil.rmtree(folder, ignore_errors=True)
                        self._folder = None
                    self._handle(message)
                    if isinstance(message, ModelFailed):
                        break
                    if isinstance(message, Ready):
                        ready_since = self._last_message
        except msgspec.DecodeError:
            logger.exception("the engine sent a message that cannot be read")
        finally:
            self._link = self.facts = self._folder = None
            self.stats = Stats()
            shutil.rmtree(folder, ignore_errors=True)
            await link.close()
        self._bury(link.death(), loading=ready_since is None)
        return time.monotonic() - ready_since if ready_since is not None else 0.0

    def _bury(self, death: str, *, loading: bool) -> None:
        """Say how the process ended, and end its turns."""
        if self._state == "stopping":
            return self._end_turns(SHUTTING_DOWN)
        if loading:
            self._loading.failure = (
                self._loading.failure or f"the engine process ended while loading the model ({death})"
            )
        if self._loading.is_over:  # else whoever waits for it says so
            logger.error("%s; restarting it", self._loading.failure or f"the engine process ended ({death})")
        return self._end_turns("The engine stopped while it ran this request; it is being restarted.")

    # --- messages -----------------------------------------------------------------------------------------

    def _handle(self, message: FromEngine) -> None:
        match message:
            case StepOutputs(deltas, stats, at):
                self.stats = stats
                self._turns.push(deltas, SHUTTING_DOWN if self._ending else None, at)
            case Refused():
                self._turns.refuse(message)
            case Loading(stage):
                self._on_loading(stage)
            case TokenizerRead(parts):
                self._loading.set_tokenizer(parts)
            case Ready(facts):
                self._ready(facts)
            case ModelFailed(text):
                self._loading.failure = text
            case Forgotten(tenant, session, life):
                if life is not None:
                    self._on_forgotten(tenant, session, life)
            case Inspected() | Exported() | Imported() | Expanded() | AdapterLoaded() | Transcribed() | Pooled():
                self._calls.answer(message)

    def _ready(self, facts: ModelFacts) -> None:
        self.facts = facts
        if self._state != "stopping":
            self._state = "ready"
        restarted = self._loading.is_over
        self._loading.complete(facts)
        if restarted:
            logger.warning("the engine was restarted and is ready after %.1f s", self._loading.seconds)
        self._on_ready(facts)

    def _cancel(self, name: str) -> None:
        if self._link is not None:
            self._link.send_later(Cancel(name))

    def _end_turns(self, message: str) -> None:
        self._turns.fail(message)
        self._calls.fail(message)
