"""Several models for a test: an app over fake engines that are loaded and unloaded as real ones are."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fake_engine import FakeEngine
from fastapi import FastAPI
from http_context import FAST_FOLDER, HOST, MAX_CAPSULE, demo_tokens, empty_log, share_routers
from msgspec import structs

import server.app
from scheduler.model_facts import AdapterFacts, ModelFacts
from server.api.sessions.transfers import Transfers
from server.engine.engine import EngineFailed, LoadableEngine
from server.log.session_log import SessionLog
from server.models.offered_model import OfferedModel
from server.models.registry import ModelRegistry
from server.models.room import ModelRoom
from server.turns.context import ServerContext
from server.turns.running_turns import RunningTurns


class LoadingEngine(FakeEngine):
    """A fake engine that loads when its ``gate`` is open, and notes in ``events`` what happens to it."""

    def __init__(self, name: str, events: list[str], gate: asyncio.Event, facts: ModelFacts) -> None:
        super().__init__(demo_tokens())
        self.name = name
        self.reply = f"I am {name}."
        self.events = events
        self.gate = gate
        self.fails = False
        self.loaded_facts = facts
        self.facts = None

    async def wait_ready(self) -> ModelFacts:
        """Wait for the gate."""
        self.events.append(f"load {self.name}")
        await self.gate.wait()
        if self.fails:
            raise EngineFailed("its file /secret/path is damaged")
        self.facts = self.loaded_facts
        return self.loaded_facts

    async def stop(self, flush: float = 0.0, grace: float = 5.0) -> None:
        """Note it, once."""
        if not self.draining:
            self.events.append(f"stop {self.name} {flush:g}")
        await super().stop()


@dataclass
class ModelSite:
    """``events``: loads and ends of engines, in order. ``gates``: by model, open unless a test closes it."""

    app: FastAPI
    models: ModelRegistry
    log: SessionLog
    http: httpx.AsyncClient
    events: list[str] = field(default_factory=list)
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    failing: set[str] = field(default_factory=set)

    async def chat(self, model: str, session: str = "", headers: Any = None, **body: Any) -> httpx.Response:
        """A chat with a model, on a session if one is named."""
        path = f"/v1/sessions/{session}/chat/completions" if session else "/v1/chat/completions"
        messages = [{"role": "user", "content": "Hello"}]
        return await self.http.post(path, json={"model": model, "messages": messages, **body}, headers=headers)

    def engine(self, name: str) -> LoadingEngine:
        """The engine of a loaded model."""
        engine = self.models.get(name).engine
        assert isinstance(engine, LoadingEngine)
        return engine

    async def status(self) -> dict[str, str]:
        """What each model is doing, as the API tells."""
        listed = (await self.http.get("/v1/models")).json()["data"]
        return {model["id"]: model["status"]["value"] for model in listed}


@asynccontextmanager
async def model_site(
    *names: str,
    most: int = 2,
    memory: int | None = None,
    pinned: tuple[str, ...] = (),
    facts: dict[str, dict[str, Any]] | None = None,
    idle_seconds: float = 0.0,
    any_model: bool = False,
    **parts: Any,
) -> AsyncIterator[ModelSite]:
    """A ModelSite whose first model and ``pinned`` ones are loaded. ``facts`` change those of some models; ``parts``
    are for ``create_app``.
    """
    from fake_engine import FACTS

    events: list[str] = []
    gates = {name: asyncio.Event() for name in names}
    failing: set[str] = set()
    with tempfile.TemporaryDirectory(dir=FAST_FOLDER) as folder:
        path = Path(folder) / "log.sqlite"
        path.write_bytes(empty_log())
        log = SessionLog(path)
        running = RunningTurns()

        def model(name: str) -> OfferedModel:
            own = structs.replace(FACTS, fingerprint=name * 4, **(facts or {}).get(name, {}))

            def new_engine() -> LoadableEngine:
                adapters = tuple(AdapterFacts(adapter, 8, 2, 64, "d" * 32) for adapter in made.adapters)
                engine = LoadingEngine(name, events, gates[name], structs.replace(own, adapters=adapters))
                engine.adapters = {source.name: source.folder for source in made.adapters.values()}
                engine.fails = name in failing
                return engine

            async def open_context(engine: LoadableEngine) -> ServerContext:
                return ServerContext(
                    engine, log, demo_tokens(), name, metrics=made.metrics, any_model=any_model, running=running,
                    aliases=frozenset([f"{name}-alias"]), by_fingerprint=lambda: registry.by_fingerprint(),
                )  # fmt: skip

            made = OfferedModel(name, [f"{name}-alias"], new_engine, open_context, pinned=name in pinned)
            gates[name].set()
            return made

        room = ModelRoom(most, memory)
        registry = ModelRegistry([model(name) for name in names], room, any_model=any_model, idle_seconds=idle_seconds)
        transfers = Transfers(Path(folder) / "transfer", MAX_CAPSULE)
        app = server.app.create_app(
            registry, log, **{"api_keys": {}, "transfers": transfers, "allowed_hosts": [HOST], **parts}
        )
        share_routers(app)
        await registry.start()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{HOST}") as http:
            yield ModelSite(app, registry, log, http, events, gates, failing)
        registry.drain()
        await registry.stop(0.0)
        await log.close()
