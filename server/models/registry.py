"""``ModelRegistry``: the models of a server. A request gets its model here, which is loaded for it if need be."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace

from starlette.requests import HTTPConnection
from starlette.types import Receive

from scheduler.model_facts import ModelFacts
from server.config.usage_error import UsageError
from server.engine.engine import EngineFailed, LoadableEngine, TurnRefused
from server.errors import ApiError, unavailable
from server.http.sse import while_connected
from server.models.engine_group import EngineGroup
from server.models.model_use import ModelUse
from server.models.offered_model import OfferedModel
from server.models.room import ModelRoom
from server.models.tasks import Tasks, check_task
from server.turns.context import STOPPING_RETRY, ServerContext, model_not_found

BUSY_SECONDS = 60.0  # at most, for the turns of a model that has to make room
LOOK_SECONDS = 0.05  # between two looks at whether they are over
IDLE_LOOK_SECONDS = 1.0  # between two looks for idle models
FAILED_SECONDS = 10.0  # after a load that failed, until another one is tried
FULL_RETRY = 10  # seconds, told to a client whose model finds no room
SHUTTING_DOWN = "The server is shutting down."

logger = logging.getLogger("warmturn.models")


class ModelRegistry:
    """All models that a server offers. One model is loaded or unloaded at a time, in the order in which they were asked
    for. ``engines`` is all loaded engines as one, for what concerns a session and no model.

    A model that needs room takes it from those that are not pinned, idle ones first, then by when they were last used;
    its requests wait, and so do new ones of a model that has to go, until that one is back.
    """

    def __init__(
        self,
        models: Sequence[OfferedModel],
        room: ModelRoom,
        *,
        any_model: bool = True,
        idle_seconds: float = 0.0,
        flush_seconds: float = 30.0,
    ) -> None:
        """The first of ``models`` is meant by requests that name none, and with ``any_model`` by those with a name that
        no model has. ``idle_seconds``: after which a model that is not pinned is unloaded; 0: never. An engine that is
        ended has ``flush_seconds`` to write KV. Raises UsageError for a name that two models have.
        """
        self.models = tuple(models)
        self.first = self.models[0]
        self.engines = EngineGroup(self.loaded_engines)
        self._by_name: dict[str, OfferedModel] = {}
        for model in self.models:
            for name in model.names:
                if self._by_name.setdefault(name, model) is not model:
                    raise UsageError(f"two models have the name {name}: give one of them another")
        self._room = room
        self._any_model = any_model
        self.idle_seconds = idle_seconds
        self._flush_seconds = flush_seconds
        self._changing = asyncio.Lock()  # held while a model is loaded or unloaded
        self.stopping = False
        self._shared: tuple[ServerContext, ServerContext] | None = None  # a context, and the same with all engines

    # --- which model ------------------------------------------------------------------------------------------

    def loaded_engines(self) -> list[LoadableEngine]:
        """The engines of the loaded models, the first model's first."""
        return [model.engine for model in self.models if model.is_loaded and model.engine is not None]

    def offered_models(self, allowed: frozenset[str] | None) -> list[OfferedModel]:
        """The models that a key may use. ``allowed``: names of models; None: all."""
        if allowed is None:
            return [*self.models]
        return [model for model in self.models if not allowed.isdisjoint(model.names)]

    def get(self, name: str, allowed: frozenset[str] | None = None) -> OfferedModel:
        """The model of exactly this name. Raises a 404."""
        model = self._by_name.get(name)
        if model is None or model not in self.offered_models(allowed):
            raise model_not_found("model", self._names(allowed))
        return model

    def adapters(self, allowed: frozenset[str] | None) -> list[tuple[OfferedModel, str]]:
        """The adapters that a key may use, by their names, each with its model."""
        of_all = ((model, name) for model in self.models for name in model.adapters)
        return [(model, name) for model, name in of_all if allowed is None or name in allowed]

    def find(self, name: str, allowed: frozenset[str] | None = None, tasks: Tasks = ()) -> OfferedModel:
        """The model that a request means by ``name``, by itself or with an adapter; "" is no name. Raises a 404."""
        return self.choose(name, allowed, tasks)[0]

    def choose(self, name: str, allowed: frozenset[str] | None = None, tasks: Tasks = ()) -> tuple[OfferedModel, str]:
        """The model that a request means by ``name``, and the adapter; "" is no name, or no adapter. A name that no
        model has means the first one that may be for one of the request's ``tasks``, the earlier ones of these first.
        Raises a 404.
        """
        offered = [(model, "") for model in self.offered_models(allowed)]
        adapters = self.adapters(allowed)
        for said in (name, name.removesuffix(":latest")):  # as Ollama's clients say it
            model = self._by_name.get(said)
            if model is not None and (model, "") in offered:
                return model, ""
            if found := next((pair for pair in adapters if pair[1] == said), None):
                return found
        if not (offered or adapters) or (name and not self._any_model):
            raise model_not_found("model", self._names(allowed))
        suited = (pair for task in tasks for pair in offered if pair[0].task in (task, None))
        return next(suited, (offered or adapters)[0])

    def has(self, name: str) -> bool:
        return name in self._by_name or any(name in model.adapters for model in self.models)

    def _names(self, allowed: frozenset[str] | None) -> str:
        names = [model.name for model in self.offered_models(allowed)] + [name for _, name in self.adapters(allowed)]
        return ", ".join(names) or "none for this key"

    def using(
        self, connection: HTTPConnection, name: str, receive: Receive | None = None, tasks: Tasks = ()
    ) -> ModelUse:
        """Within it the request's context (``context_of``) is that of the model it means, which is loaded first if it
        is not, and stays loaded. Raises a 404, and a 503 with Retry-After where there is no room, or it cannot be
        loaded. ``receive``: of an HTTP request, whose client may leave while it waits (ClientLeft). ``tasks``: what
        the request asks for, one of which the model must be for, else a 400 is raised; empty: any.
        """
        return ModelUse(self, connection, name, receive, tasks)

    async def begin_use(
        self, connection: HTTPConnection, name: str, receive: Receive | None, tasks: Tasks
    ) -> OfferedModel:
        """The start of ``using``: whoever is given the model calls ``end_use``."""
        model, adapter = self.choose(name, allowed_models(connection), tasks)
        check_task(model, tasks)
        if not model.is_loaded:
            self._refuse_if_hopeless(model)
        began = time.perf_counter_ns()
        while not model.stays.is_set():
            await model.stays.wait()
        model.users += 1
        try:
            if not model.is_loaded:
                loading = self._load_once(model)
                await (loading if receive is None else while_connected(receive, loading))
                check_task(model, tasks)
        except BaseException:
            self.end_use(model)
            raise
        assert model.context is not None
        connection.state.context = model.context_with(adapter)
        connection.state.load_ns = time.perf_counter_ns() - began
        return model

    def end_use(self, model: OfferedModel) -> None:
        """A request is done with the model."""
        model.users -= 1
        model.used = time.monotonic()

    async def media_kinds(self, connection: HTTPConnection, name: str) -> Collection[str]:
        """The kinds of media that the model takes which a request means by ``name``; it is loaded if it never was.
        Raises a 404 and a 503.
        """
        model = self.find(name, allowed_models(connection))
        if model.known_facts is None:
            await self.load(model)
        return () if model.known_facts is None else model.known_facts.media

    async def free_for(self, name: str, allowed: frozenset[str] | None, tasks: Tasks) -> None:
        """Wait until the model that a request for these tasks means, which nobody waits for, is loaded, or no other one
        is in use that would make room.
        """
        with suppress(ApiError):  # the request itself is told so
            model = self.find(name, allowed, tasks)
            while not model.is_loaded and any(other.is_loaded and other.is_busy for other in self.models):
                await asyncio.sleep(IDLE_LOOK_SECONDS)

    @property
    def may_take_media(self) -> bool:
        """Whether a model takes media, or may: one that was never loaded."""
        return any(model.known_facts is None or model.known_facts.media for model in self.models)

    def context(self) -> ServerContext:
        """The context of requests that name no model: of the first one, with the engines of all."""
        own = self.first.context
        assert own is not None, "the first model is loaded before the port is open"
        if self._shared is None or self._shared[0] is not own:
            self._shared = own, replace(own, engine=self.engines)
        return self._shared[1]

    def by_fingerprint(self) -> dict[str, ServerContext]:
        """The contexts of all models that were loaded so far, by the fingerprints of their tokenizers."""
        found = {}
        for model in reversed(self.models):
            if model.context is not None and model.facts is not None:
                found[model.context.tokens.fingerprint(model.facts.vocab_size)] = model.context
        return found

    # --- early refusals ---------------------------------------------------------------------------------------

    def turns_away(self, tenant: str) -> TurnRefused | None:
        """The refusal that a turn of this tenant would get now from every loaded model; None where one would queue it,
        or another could be loaded.
        """
        engines = self.loaded_engines()
        if not engines or len(engines) < len(self.models):
            return None
        refusals = [engine.turns_away(tenant) for engine in engines]
        return None if None in refusals else refusals[0]

    def reading(self, tenant: str) -> AbstractContextManager[None]:
        """See ``Engine``. With several models nobody knows yet which one a request is for: none keeps a place."""
        engine = self.first.engine
        return nullcontext() if len(self.models) > 1 or engine is None else engine.reading(tenant)

    # --- loading ----------------------------------------------------------------------------------------------

    async def start(self) -> ModelFacts:
        """Load the first model and the pinned ones. Returns the facts of the first. Raises EngineFailed or
        UsageError.
        """
        for model in self.models:
            if model is self.first or model.pinned:
                async with self._changing:
                    await model.load()
        assert self.first.facts is not None
        return self.first.facts

    async def load(self, model: OfferedModel) -> None:
        """Load a model unless it is loaded. Raises a 503."""
        self._refuse_if_hopeless(model)
        while not model.stays.is_set():
            await model.stays.wait()
        if not model.is_loaded:
            await self._load_once(model)

    async def unload(self, model: OfferedModel) -> None:
        """Unload a model once its turns are over. Raises a 409 for one that is pinned, and a 503 if it stays busy."""
        if model.pinned:
            raise ApiError(409, "This model is pinned: it stays loaded.", code="model_pinned")
        async with self._changing:
            if model.is_loaded and not await self._leave(model, time.monotonic() + BUSY_SECONDS):
                raise unavailable("The model is in use.", FULL_RETRY, "model_busy")

    async def unload_idle(self) -> None:
        """Unload what has been idle for as long as it may, for as long as this runs."""
        while True:
            await asyncio.sleep(IDLE_LOOK_SECONDS)
            for model in self.models:
                async with self._changing:
                    if self._is_idle(model):
                        logger.info("%s is idle: it is unloaded", model.name)
                        await self._leave(model, time.monotonic())

    def _is_idle(self, model: OfferedModel) -> bool:
        if not model.is_loaded or model.is_busy:
            return False
        return time.monotonic() - model.used >= model.stay(self.idle_seconds)

    def keep(self, name: str, allowed: frozenset[str] | None, tasks: Tasks, seconds: float) -> None:
        """Unload a model when it has been idle for ``seconds``, unless it is pinned. Raises a 404."""
        self.find(name, allowed, tasks).kept = seconds

    def _refuse_if_hopeless(self, model: OfferedModel) -> None:
        if self.stopping:
            raise unavailable(SHUTTING_DOWN, STOPPING_RETRY)
        if model.failed_at is not None and time.monotonic() - model.failed_at < FAILED_SECONDS:
            raise load_failed()

    async def _load_once(self, model: OfferedModel) -> None:
        """Wait for the load of a model, which begins if none goes on."""
        if model.loading is None:
            model.loading = asyncio.create_task(self._load(model))
            model.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        task = model.loading
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not (self.stopping and task.cancelled()):
                raise  # who waits here was cancelled, not the load
            raise unavailable(SHUTTING_DOWN, STOPPING_RETRY) from None

    async def _load(self, model: OfferedModel) -> None:
        began = time.monotonic()
        try:
            model.stage = "waiting for other models"
            async with self._changing:
                if self.stopping:
                    raise unavailable(SHUTTING_DOWN, STOPPING_RETRY)
                model.stage = "making room"
                model.prepare()  # it imports its modules while others write their KV
                try:
                    await self._make_room(model)
                    model.stage = "starting"
                    await model.load()
                except (EngineFailed, UsageError) as error:
                    model.failed_at = time.monotonic()
                    logger.error("%s cannot be loaded: %s", model.name, error)
                    raise load_failed() from None
                except BaseException:
                    await model.unload(0.0)
                    raise
                model.failed_at = None
                logger.info("%s is loaded after %.1f s", model.name, time.monotonic() - began)
        finally:
            model.loading, model.stage = None, ""

    async def _make_room(self, model: OfferedModel) -> None:
        """Unload others until the model fits. Raises a 503."""
        until = time.monotonic() + BUSY_SECONDS
        if not self._room.ever_fits(model):
            raise unavailable("This model needs more memory than the server may use.", 60, "model_too_large")
        while not self._room.fits(model, [other for other in self.models if other.is_loaded]):
            may_go = [other for other in self.models if other.is_loaded and not other.pinned]
            if not may_go:
                raise no_room()
            victim = min(may_go, key=lambda other: (other.is_busy, other.used))
            logger.info("%s makes room for %s", victim.name, model.name)
            if not await self._leave(victim, until):
                raise no_room()

    async def _leave(self, model: OfferedModel, until: float) -> bool:
        """Unload a model when its requests and turns are over; False if they are not in time, and it stays. Requests
        that come meanwhile wait for either.
        """
        model.stays.clear()
        try:
            while model.is_busy:
                if time.monotonic() >= until or self.stopping:
                    return False
                await asyncio.sleep(LOOK_SECONDS)
            await model.unload(self._flush_seconds)
            return True
        finally:
            model.stays.set()

    # --- the end ----------------------------------------------------------------------------------------------

    @property
    def in_hand(self) -> int:
        """Turns that run, or have ended but whose answer is still being committed and written; and requests that have
        speech written down, window by window.
        """
        hearing = (model for model in self.models if model.facts is not None and model.facts.speech is not None)
        return sum(engine.in_hand for engine in self._live()) + sum(model.users for model in hearing)

    def drain(self) -> None:
        """Refuse new turns and loads; running turns go on."""
        self.stopping = True
        for model in self.models:
            if model.loading is not None:
                model.loading.cancel()
        for engine in self._live():
            engine.drain()

    async def stop(self, flush: float) -> None:
        """End all engines, each with ``flush`` seconds to write KV."""
        self.stopping = True
        await asyncio.gather(*(engine.stop(flush=flush) for engine in self._live()))

    def kill(self) -> None:
        """Kill all engine processes, for a server that exits without waiting."""
        for engine in self._live():
            engine.kill()

    def _live(self) -> list[LoadableEngine]:
        return [model.engine for model in self.models if model.engine is not None]


def allowed_models(connection: HTTPConnection) -> frozenset[str] | None:
    """The names of the models that the request's key may use; None: all."""
    allowed: frozenset[str] | None = connection.scope.get("state", {}).get("models")
    return allowed


def registry_of(connection: HTTPConnection) -> ModelRegistry:
    registry: ModelRegistry = connection.app.state.models
    return registry


def load_failed() -> ApiError:
    """503: the model cannot be loaded; the server's log says why."""
    return unavailable("The model could not be loaded: the server's log says why.", 30, "model_load_failed")


def no_room() -> ApiError:
    """503: no loaded model can make room."""
    return unavailable("There is no room for this model: those that are loaded are in use.", FULL_RETRY, "no_room")
