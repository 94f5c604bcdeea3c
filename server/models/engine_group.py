"""``EngineGroup``: all loaded engines as one ``Engine``, for what is asked of a session and not of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import msgspec

from cache.tier import Tier, TierHolding
from scheduler.engine_stats import Stats
from scheduler.model_facts import ModelFacts
from scheduler.pooling_messages import Pooled, PoolInput
from scheduler.protocol import Expanded, Exported, Imported, Inspected, MediaItem, Submit, Warm
from scheduler.speech_messages import Transcribe, Transcribed
from server.engine.engine import Engine, EngineUnavailable, State, TurnRefused, TurnStream

UNLOADED = "No model is loaded."
RETRY = 5  # seconds


class EngineGroup:
    """Implements ``Engine`` over the engines that ``engines`` lists. What changes a session is told to all of them;
    what asks for its KV is answered by the one that has most of it. A turn needs a model: it cannot be submitted here.
    """

    def __init__(self, engines: Callable[[], Sequence[Engine]]) -> None:
        self._engines = engines

    @property
    def facts(self) -> ModelFacts | None:
        """Of the first engine that is ready."""
        return next((engine.facts for engine in self._engines() if engine.facts is not None), None)

    @property
    def stats(self) -> Stats:
        """Of the first engine."""
        return next((engine.stats for engine in self._engines()), Stats())

    @property
    def healthy(self) -> bool:
        """Whether every engine that is loaded is healthy; so they are when none is."""
        return all(engine.healthy for engine in self._engines())

    def state(self) -> State:
        """The first engine's; ready if none is loaded: one will be when it is asked for."""
        return next((engine.state() for engine in self._engines()), "ready")

    def submit(self, request: Submit) -> TurnStream:
        """Raises EngineUnavailable."""
        raise EngineUnavailable(UNLOADED, RETRY)

    def turns_away(self, tenant: str) -> TurnRefused | None:
        """See ``Engine``: the first one's."""
        return next((engine.turns_away(tenant) for engine in self._engines()), None)

    def reading(self, tenant: str) -> AbstractContextManager[None]:
        """See ``Engine``: the first one's."""
        return self._ready()[0].reading(tenant)

    def forget(self, tenant: str, session: str, life: int | None = None) -> None:
        for engine in self._engines():
            engine.forget(tenant, session, life)

    def cancel(self, tenant: str, session: str) -> bool:
        cancelled = [engine.cancel(tenant, session) for engine in self._engines()]
        return any(cancelled)

    def end(self, tenant: str, session: str, failure: Exception) -> None:
        for engine in self._engines():
            engine.end(tenant, session, failure)

    def pin(self, tenant: str, session: str, until: float) -> None:
        for engine in self._engines():
            engine.pin(tenant, session, until)

    def await_tools(self, turn: str, tools: Sequence[str]) -> None:
        """See ``Engine``: the one that knows the turn."""
        for engine in self._engines():
            engine.await_tools(turn, tools)

    def warm(self, announced: Warm) -> None:
        for engine in self._engines():
            engine.warm(announced)

    async def inspect(self, tenant: str, session: str) -> Inspected:
        """See ``Engine``: of each tier the most that one engine holds there."""
        found = [await engine.inspect(tenant, session) for engine in self._ready()]
        if len(found) == 1:
            return found[0]
        tiers: dict[Tier, TierHolding] = {}
        for one in found:
            for tier, held in one.tiers.items():
                if tier not in tiers or held.tokens > tiers[tier].tokens:
                    tiers[tier] = held
        return msgspec.structs.replace(found[0], tiers=tiers, running=any(one.running for one in found))

    async def expand(self, tenant: str, media: Sequence[MediaItem]) -> Expanded:
        """See ``Engine``: by the first one, as prompts of requests that name no model are its."""
        return await self._ready()[0].expand(tenant, media)

    async def transcribe(self, window: Transcribe) -> Transcribed:
        """Raises EngineUnavailable: it needs a model, as a turn does."""
        raise EngineUnavailable(UNLOADED, RETRY)

    async def pool(self, tenant: str, inputs: Sequence[PoolInput], spare: bool = False) -> Pooled:
        """Raises EngineUnavailable."""
        raise EngineUnavailable(UNLOADED, RETRY)

    async def export(self, tenant: str, session: str, folder: str, token_ids: bytes) -> Exported:
        """See ``Engine``: from the one with the longest beginning of the session."""
        engines = self._ready()
        chosen = engines[0]
        if len(engines) > 1:
            held = [await engine.inspect(tenant, session) for engine in engines]
            most = [max((tier.tokens for tier in one.tiers.values()), default=0) for one in held]
            chosen = engines[most.index(max(most))]
        return await chosen.export(tenant, session, folder, token_ids)

    async def import_(self, tenant: str, session: str, folder: str) -> Imported:
        """See ``Engine``: into the first one whose model they are of."""
        *others, last = self._ready()
        for engine in others:
            taken = await engine.import_(tenant, session, folder)
            if taken.tokens:
                return taken
        return await last.import_(tenant, session, folder)

    def _ready(self) -> Sequence[Engine]:
        """The engines that answer; where none does, one that says why."""
        engines = self._engines()
        if not engines:
            raise EngineUnavailable(UNLOADED, RETRY)
        return [engine for engine in engines if engine.facts is not None] or engines[:1]
