"""``create_app``: the FastAPI app with its routers, middleware and context."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI
from starlette.types import ASGIApp

from server.api import routers
from server.api.anthropic.diagnostics import DiagnosticsTable
from server.api.responses.background import BackgroundResponses
from server.api.sessions.transfers import Transfers
from server.batches.batch_runner import BatchRunner
from server.batches.inner_request import ask
from server.batches.storage import BatchStorage
from server.dispatch import Dispatch
from server.http import error_responses, page_routes
from server.http.body import only_known_parameters
from server.http.body_memory import BodyMemory
from server.log.session_log import SessionLog
from server.media.media_reader import MediaReader
from server.media.sound_reader import SoundReader
from server.middleware.access import Access, LastResort
from server.middleware.auth import Guard, Hosts, Keyring
from server.middleware.cors import Cors
from server.middleware.key_file import KeyFile
from server.middleware.overload import Overload, TurnRoutes
from server.models.registry import ModelRegistry
from server.telemetry import traces
from server.telemetry.vllm_names import VllmNames

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from server.media.fetching import Fetcher


def create_app(
    models: ModelRegistry,
    log: SessionLog,
    *,
    api_keys: Mapping[str, str],
    key_file: KeyFile | None = None,
    transfers: Transfers,
    allowed_hosts: Collection[str] = (),
    allowed_origins: Collection[str] = (),
    ignore_unknown: bool = False,
    adapter_folder: Path | None = None,
    vllm_names: bool = False,
    ollama: bool = True,
    sharing: bool = False,
    tracer_provider: TracerProvider | None = None,
    fetcher: Fetcher | None = None,
    batches: BatchStorage | None = None,
) -> FastAPI:
    """The app over these parts. ``api_keys`` is tenant -> key; ``key_file`` has further ones. Without both, every
    client is tenant "default" and needs no key, and the Host header must be an IP address, localhost or one of
    ``allowed_hosts``. Web pages of ``allowed_origins`` may call the API (CORS). ``ignore_unknown``: unknown fields of
    bodies are ignored instead of refused. ``vllm_names``: ``/metrics`` also has vLLM's metric names. ``ollama``:
    whether Ollama's API is served too; ``sharing``: whether links to sessions can be made and read.
    ``tracer_provider``: where spans go; it is closed with the app. ``fetcher`` downloads media; None: nothing is
    downloaded. ``batches``: where files and batches are; None: they are not served.
    ``adapter_folder``: below which adapters may be loaded over HTTP; None: none may.
    """
    app = empty_app(tracer_provider)
    models.first.metrics.log_opened(log.salvage, log.older)
    if vllm_names:
        for model in models.models:
            model.metrics.registry.register(VllmNames(model.metrics, model.name))
    keyring = Keyring(api_keys, key_file)
    app.state.models = models
    app.state.background = BackgroundResponses(log)
    app.state.diagnostics = DiagnosticsTable()
    app.state.transfers = transfers
    app.state.media_reader = MediaReader(log.media.get, fetcher)
    app.state.sounds = SoundReader()
    app.state.telemetry = tracer_provider
    app.state.ignore_unknown = ignore_unknown
    app.state.adapter_folder = adapter_folder
    app.state.bodies = BodyMemory()
    app.state.batches = None if batches is None else BatchRunner(batches.records, batches.files, keyring.find)
    if batches is not None:
        log.holdings.beside = batches.files.bytes_of
    parts = {"ollama": ollama, "sharing": sharing, "batches": batches is not None}
    turns = include_routes(app, without=[name for name, wanted in parts.items() if not wanted])
    app.before = partial(_in_front, app, turns, Hosts(allowed_hosts), keyring, allowed_origins)
    return app


def _in_front(
    app: App,
    turns: TurnRoutes,
    hosts: Hosts,
    keyring: Keyring,
    allowed_origins: Collection[str],
    rest: ASGIApp,
) -> ASGIApp:
    """What a request goes through before its route, ``rest``; the outermost first."""
    models: ModelRegistry = app.state.models
    app.state.dispatch = Dispatch(rest, turns, models)
    admitted = Overload(app.state.dispatch, models, turns)
    guard = Guard(admitted, keyring, hosts, allowed_origins)
    access = Access(guard, models.first.metrics)
    return Cors(access, allowed_origins) if allowed_origins else access


def include_routes(app: FastAPI, without: Collection[str]) -> TurnRoutes:
    """Give the app all routes but those of families that are left out, and its answers to errors. Returns the routes
    that become turns.
    """
    endpoints = [*routers(without=without)]
    for router in endpoints:
        app.include_router(router, dependencies=[Depends(only_known_parameters)])
    app.include_router(page_routes.router)
    error_responses.install(app)
    app.add_middleware(LastResort)
    return TurnRoutes(route for router in endpoints for route in router.routes)


def empty_app(tracer_provider: TracerProvider | None) -> App:
    """The app without its parts."""
    return App(
        title="warmturn",
        docs_url=None,  # both pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the client's Host header
        lifespan=lifespan,
        telemetry={
            "tracer_provider": tracer_provider,
            "exclude": traces.is_untraced,
            "auto_configure": False,
            "logs": False,  # they would hold what clients sent
            "operation_spans": False,
        },
        responses={"4XX": {"description": "Refused"}, "5XX": {"description": "Failed"}},
    )


class App(FastAPI):
    """FastAPI with ``before``, a function that wraps the whole middleware stack in further ASGI apps."""

    before: Callable[[ASGIApp], ASGIApp]

    def build_middleware_stack(self) -> ASGIApp:
        return self.before(super().build_middleware_stack())


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    """Begins batches. At shutdown, ends them, background responses, turns and the check of pictures, and sends the last
    spans.
    """
    begin_batches(app)
    yield
    if app.state.batches is not None:
        await app.state.batches.close()
    await app.state.models.context().running.close()
    await app.state.background.close()
    await app.state.media_reader.close()
    await app.state.sounds.close()
    if app.state.telemetry is not None:
        await traces.close(app.state.telemetry)


def begin_batches(app: FastAPI) -> None:
    """Go on with the batches that are not over; their requests take the way of others from behind the keys."""
    if app.state.batches is None:
        return
    if app.middleware_stack is None:
        app.middleware_stack = app.build_middleware_stack()
    app.state.batches.start(partial(ask, app, app.state.dispatch), app.state.dispatch.free_for)
