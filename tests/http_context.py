"""The whole HTTP server for a test: the app over a fake engine, a real log in a temporary folder, demo tokenizer."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import httpx
from fake_engine import FakeEngine
from fastapi import FastAPI
from starlette.routing import BaseRoute, Route

import server.app
from scheduler.protocol import unpack_ids
from server.api.sessions.transfers import Transfers
from server.batches.storage import BatchStorage
from server.chat.chat_tokenizer import ChatTokenizer
from server.log.session_log import SessionLog
from server.models.offered_model import OfferedModel
from server.models.registry import ModelRegistry
from server.models.room import ModelRoom
from server.telemetry import traces
from server.turns.context import ServerContext

P = ParamSpec("P")
T = TypeVar("T")
Scenario = Callable[Concatenate[T, P], Awaitable[None]]
Test = Callable[P, Coroutine[Any, Any, None]]
MODEL = "demo"
HOST = "warm"
OF_CONTEXT = {"template", "thinking", "line_seconds", "aliases", "any_model"}
MAX_CAPSULE = 1 << 20  # bytes
PATIENCE = 20.0  # seconds until a test that hangs fails
FAST_FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None  # the log's fsyncs cost nothing there
HELLO = [{"role": "user", "content": "Hello"}]


@functools.cache
def demo_tokens() -> ChatTokenizer:
    """The demo model's tokenizer, loaded once."""
    return ChatTokenizer.load(str(Path(server.app.__file__).parent / "demo"))


def reply_ids() -> list[int]:
    """What the fake engine says unless a test tells it otherwise, up to its end-of-turn token."""
    return demo_tokens().encode("Hello there, friend.", special=False)


@functools.cache
def empty_log() -> bytes:
    """The file of a log that was opened once: making its tables takes as long as a whole request."""
    with tempfile.TemporaryDirectory(dir=FAST_FOLDER) as folder:
        path = Path(folder) / "log.sqlite"
        with ThreadPoolExecutor(1) as apart:  # of the event loop that may run in this thread
            apart.submit(lambda: asyncio.run(SessionLog(path).close())).result()
        return path.read_bytes()


@dataclass
class Site:
    """``context`` is that of the only model; it can be replaced."""

    app: FastAPI
    engine: FakeEngine
    log: SessionLog
    http: httpx.AsyncClient

    @property
    def context(self) -> ServerContext:
        context = self.app.state.models.first.context
        assert isinstance(context, ServerContext)
        return context

    @context.setter
    def context(self, context: ServerContext) -> None:
        self.app.state.models.first.context = context

    def prompt_ids(self, at: int = -1) -> list[int]:
        """The tokens of a prompt that the engine was given."""
        return [*unpack_ids(self.engine.submitted[at].prompt)]

    def prompt(self, at: int = -1) -> str:
        """The same as text."""
        return self.context.tokens.decode(self.prompt_ids(at))

    def prompts(self) -> list[str]:
        """All of them."""
        return [self.prompt(at) for at in range(len(self.engine.submitted))]

    async def chat(self, path: str = "/v1/chat/completions", headers: Any = None, **body: Any) -> httpx.Response:
        """POST a chat; messages default to one hello."""
        return await self.http.post(path, json={"messages": HELLO, **body}, headers=headers)

    async def complete(self, headers: Any = None, **body: Any) -> httpx.Response:
        """POST a completion."""
        return await self.http.post("/v1/completions", json={"prompt": "Once", **body}, headers=headers)


ROUTERS: dict[tuple[int, ...], list[BaseRoute]] = {}  # of apps, by the routers that they include


def share_routers(app: FastAPI) -> None:
    """Give an app the included routers of the first one like it: each app makes its own endpoints of them at its first
    requests, which takes longer than the rest of a test.
    """
    routes = app.router.routes
    own = sum(isinstance(route, Route) for route in routes)  # which are the first ones
    key = tuple(id(getattr(route, "original_router", route)) for route in routes[own:])
    routes[own:] = ROUTERS.setdefault(key, routes[own:])


def only_model(engine: FakeEngine, log: SessionLog, tokens: ChatTokenizer, **parts: Any) -> ModelRegistry:
    """A registry with one loaded model. ``parts`` are for its ServerContext."""
    aliases, any_model = parts.pop("aliases", ()), parts.pop("any_model", False)
    context = ServerContext(engine, log, tokens, MODEL, aliases=frozenset(aliases), any_model=any_model, **parts)
    return ModelRegistry([OfferedModel.of_engine(engine, context)], ModelRoom(1), any_model=any_model)


@asynccontextmanager
async def site(
    api_keys: Mapping[str, str] | None = None,
    tokens: ChatTokenizer | None = None,
    storage: Path | None = None,
    database: str | None = None,
    **parts: Any,
) -> Any:
    """A Site that is taken down again; ``tokens``: the demo model's. ``parts`` are for the model's context and for
    ``create_app``. ``storage``: the folder of files and batches, which do not run before ``begin_batches``.
    ``database``: the URL of the log, a new file by default.
    """
    tokens = tokens or demo_tokens()
    with tempfile.TemporaryDirectory(dir=FAST_FOLDER) as folder:
        path = Path(folder) / "log.sqlite"
        if database is None:
            path.write_bytes(empty_log())
        log = SessionLog(database or path)
        engine = FakeEngine(tokens)
        provider = parts.pop("tracer_provider", None) or traces.provider_of_environment()
        of_context = {name: parts.pop(name) for name in OF_CONTEXT & parts.keys()}
        app = server.app.create_app(
            only_model(engine, log, tokens, tracer=traces.tracer(provider), **of_context),
            log,
            api_keys=api_keys or {},
            transfers=Transfers(Path(folder) / "transfer", MAX_CAPSULE),
            allowed_hosts=[HOST],
            tracer_provider=provider,
            batches=BatchStorage(storage or Path(folder)),
            **parts,
        )
        share_routers(app)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}") as http:
            yield Site(app, engine, log, http)
        await app.state.batches.close()
        await log.close()


def within(
    opened: Callable[[], AbstractAsyncContextManager[T]], patience: float = PATIENCE
) -> Callable[[Scenario[T, P]], Test[P]]:
    """Make a test of a coroutine function whose first parameter is what ``opened()`` is entered for; the others are
    fixtures."""

    def decorate(test: Scenario[T, P]) -> Test[P]:
        @functools.wraps(test)
        async def run(*args: P.args, **kwargs: P.kwargs) -> None:
            async with opened() as made:
                await asyncio.wait_for(test(made, *args, **kwargs), patience)

        signature = inspect.signature(test)
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values()][1:]
        )
        return run

    return decorate


def served(
    api_keys: Mapping[str, str] | None = None,
    tokens: Callable[[], ChatTokenizer] | None = None,
    **parts: Any,
) -> Callable[[Scenario[Site, P]], Test[P]]:
    """Make a test of a coroutine function whose first parameter is the Site; ``parts`` are for ``create_app``."""
    return within(lambda: site(api_keys, tokens() if tokens else None, **parts))


async def until(condition: Callable[[], object]) -> None:
    """Wait until something holds."""
    while not condition():
        await asyncio.sleep(0.001)


def events(text: str) -> list[Any]:
    """The data of each event, parsed; "[DONE]" as it is. Comments are left out."""
    found: list[Any] = []
    for block in text.split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


@dataclass
class Call:
    """One request at ASGI level, for what httpx cannot do: read while it streams, and leave in the middle."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    done: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _left: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None

    @classmethod
    def post(
        cls,
        app: FastAPI,
        path: str,
        body: object,
        chunks: list[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        method: str = "POST",
        slow: bool = False,
    ) -> Call:
        """Start a request. ``chunks`` is the raw body, sent without a length; ``slow``: more of it is still to come."""
        call = cls()
        parts = [json.dumps(body).encode()] if chunks is None else chunks
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (name.lower().encode(), value.encode())
                for name, value in {"host": HOST, "content-type": "application/json", **(headers or {})}.items()
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        messages = [
            {"type": "http.request", "body": part, "more_body": slow or number < len(parts)}
            for number, part in enumerate(parts, 1)
        ]

        async def receive() -> Any:
            if messages:
                return messages.pop(0)
            await call._left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                call.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                call.body += message.get("body", b"")
                call.done = not message.get("more_body", False)
            call._news.set()

        call._task = asyncio.create_task(app(scope, receive, send))
        return call

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something has come over the wire."""
        while not condition():
            self._news.clear()
            await self._news.wait()

    async def leave(self) -> None:
        """Close the connection, and wait until the server is done with it."""
        self._left.set()
        assert self._task is not None
        with suppress(Exception):
            await self._task

    async def finish(self) -> None:
        """Wait for the end of the answer."""
        assert self._task is not None
        await self._task
