"""``OfferedModel``: one model that a server offers: its names, and its engine and context while it is loaded."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Literal

from scheduler.engine_config import AdapterSource
from scheduler.model_facts import AdapterFacts, ModelFacts
from scheduler.model_task import Task
from server.engine.engine import LoadableEngine
from server.telemetry.metrics import Metrics
from server.turns.context import ServerContext

Status = Literal["unloaded", "loading", "loaded", "unloading"]


class AdapterRefused(Exception):
    """An adapter that cannot be used; the message says why, without a path."""


class OfferedModel:
    """A model under its names. It has an engine from the beginning of a load to the end of its process, and a context
    from its first load on: after an unload that is the last one, whose engine has ended.

    Invariant: while ``users`` is not 0, nothing unloads a loaded model. Only ``server.models.registry`` loads and
    unloads.
    """

    def __init__(
        self,
        name: str,
        aliases: Sequence[str],
        new_engine: Callable[[], LoadableEngine],
        open_context: Callable[[LoadableEngine], Awaitable[ServerContext]],
        *,
        metrics: Metrics | None = None,
        pinned: bool = False,
        weight_bytes: int = 0,
        adapters: Sequence[AdapterSource] = (),
        task: Task | None = None,
    ) -> None:
        """``new_engine`` makes an engine that is not started; ``open_context`` reads the tokenizer of one that loads.
        ``pinned``: it is loaded at the start, and stays. ``weight_bytes``: of its files, as far as that is known.
        ``adapters`` are loaded with it. ``task``: what it is for, as its files say; None: unknown before its first
        load.
        """
        self.name = name
        self.aliases = tuple(aliases)
        self.metrics = metrics or Metrics()
        self.pinned = pinned
        self.weight_bytes = weight_bytes
        self._task = task
        self.adapters = {source.name: source for source in adapters}
        self.adapter_facts: dict[str, AdapterFacts] = {}  # of those that were loaded
        self.engine: LoadableEngine | None = None
        self.context: ServerContext | None = None
        self.facts: ModelFacts | None = None  # of the last load
        self.stage = ""  # of the load that goes on, in words
        self.failed_at: float | None = None  # when its last load failed, by time.monotonic
        self.loading: asyncio.Task[None] | None = None
        self.users = 0  # requests that were given to it and have no answer yet, also while it is loaded for them
        self.used = time.monotonic()
        self.kept: float | None = None  # for how many idle seconds a client has asked that it stay; None: none has
        self.stays = asyncio.Event()  # cleared while it is about to be unloaded
        self.stays.set()
        self._new_engine = new_engine
        self._open_context = open_context

    @classmethod
    def of_engine(cls, engine: LoadableEngine, context: ServerContext) -> OfferedModel:
        """A model whose engine is ready, and was made with ``context``. It is never loaded anew."""

        def never() -> LoadableEngine:
            raise AssertionError("this model is not loaded here")

        async def open_none(engine: LoadableEngine) -> ServerContext:
            raise AssertionError("this model is not loaded here")

        model = cls(
            context.served_name, sorted(context.aliases), never, open_none, metrics=context.metrics, pinned=True
        )
        model.engine, model.context, model.facts = engine, context, engine.facts
        return model

    def stay(self, usual: float) -> float:
        """For how many idle seconds it stays loaded. ``usual``: where no client has asked; 0: for ever."""
        if self.pinned:
            return math.inf
        return usual or math.inf if self.kept is None else self.kept

    @property
    def names(self) -> list[str]:
        """Its name, then its aliases."""
        return [self.name, *sorted(self.aliases)]

    def context_with(self, adapter: str) -> ServerContext:
        """The context of requests for one of its adapters; "": of those for the model alone."""
        assert self.context is not None
        if not adapter:
            return self.context
        return replace(self.context, served_name=adapter, aliases=frozenset(), adapter=adapter)

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load the adapter in a folder under a name that no other model has, into this model, which is loaded. Raises
        ``AdapterRefused``, and what an engine that is asked raises.
        """
        assert self.engine is not None
        answer = await self.engine.load_adapter(name, folder)
        if answer.facts is None:
            raise AdapterRefused(answer.error)
        self.adapter_facts[name] = answer.facts
        self.adapters[name] = AdapterSource(name, folder, needed=False)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; turns that run with it go on."""
        del self.adapters[name]
        self.adapter_facts.pop(name, None)
        if self.engine is not None:
            self.engine.unload_adapter(name)

    @property
    def is_loaded(self) -> bool:
        """Whether turns can be given to it now. An engine that is restarted after a crash counts: it comes back."""
        return self.engine is not None and self.context is not None and self.context.engine is self.engine

    @property
    def ready_facts(self) -> ModelFacts | None:
        """What its engine has measured; None while no engine of it is ready."""
        return None if self.engine is None else self.engine.facts

    @property
    def known_facts(self) -> ModelFacts | None:
        """The same, or what was measured before; None if it was never loaded."""
        return self.ready_facts or self.facts

    @property
    def task(self) -> Task | None:
        """What it is for; None where that is not known before its first load."""
        facts = self.known_facts
        return self._task if facts is None else facts.task

    @property
    def is_busy(self) -> bool:
        """Whether a request or a turn of it is not over."""
        return self.users > 0 or (self.engine is not None and self.engine.in_hand > 0)

    @property
    def status(self) -> Status:
        if self.is_loaded:
            return "loaded" if self.stays.is_set() else "unloading"
        return "unloaded" if self.loading is None and self.engine is None else "loading"

    def prepare(self) -> None:
        """Start the engine process, which imports its modules and loads nothing yet."""
        if self.engine is None:
            self.engine = self._new_engine()
            self.engine.prepare()

    async def load(self) -> ModelFacts:
        """Load the weights and the tokenizer, both at the same time. Raises EngineFailed or UsageError; then no engine
        is left.
        """
        self.prepare()
        engine = self.engine
        assert engine is not None
        try:
            await engine.start()
            opening = asyncio.ensure_future(self._open_context(engine))
            try:
                facts = await engine.wait_ready()
            except BaseException:
                opening.add_done_callback(lambda task: task.cancelled() or task.exception())
                opening.cancel()
                raise
            self.context = await opening
        except BaseException:
            self.engine = None
            await engine.stop()
            raise
        self.facts, self.used, self.kept = facts, time.monotonic(), None
        self.adapter_facts = {adapter.name: adapter for adapter in facts.adapters}
        self.adapters = {name: self.adapters[name] for name in self.adapter_facts if name in self.adapters}
        return facts

    async def unload(self, flush: float) -> None:
        """End the engine, which has ``flush`` seconds to write KV to disk."""
        engine, self.engine = self.engine, None
        if engine is not None:
            self.metrics.engine(engine.stats, False)
            await engine.stop(flush=flush)
            self.metrics.count_unload()
