"""``create_app``: the FastAPI app with its routers, middleware and context."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI
from opentelemetry.trace import TracerProvider
from starlette.types import ASGIApp

from server.api import routers
from server.api.anthropic.diagnostics import DiagnosticsTable
from server.api.responses.background import BackgroundResponses
from server.api.sessions.transfers import Transfers
from server.chat.template import UNMEASURED, Stability
from server.chat.thinking_budget import UNLIMITED, ThinkingDefaults
from server.chat.tokenizer import ChatTokenizer
from server.dispatch import Dispatch
from server.engine.engine import Engine
from server.http import error_responses, page_routes
from server.http.body import only_known_parameters
from server.http.body_memory import BodyMemory
from server.log.session_log import SessionLog
from server.middleware.access import Access, LastResort
from server.middleware.auth import Guard, Hosts, Keyring
from server.middleware.cors import Cors
from server.middleware.key_file import KeyFile
from server.middleware.overload import Overload, TurnRoutes
from server.telemetry import traces
from server.telemetry.vllm_names import VllmNames
from server.turns.context import LINE_SECONDS, ServerContext


def create_app(
    engine: Engine,
    log: SessionLog,
    tokens: ChatTokenizer,
    *,
    served_name: str,
    api_keys: Mapping[str, str],
    key_file: KeyFile | None = None,
    transfers: Transfers,
    template: Stability = UNMEASURED,
    thinking: ThinkingDefaults = UNLIMITED,
    allowed_hosts: Collection[str] = (),
    allowed_origins: Collection[str] = (),
    ignore_unknown: bool = False,
    vllm_names: bool = False,
    line_seconds: int = LINE_SECONDS,
    aliases: Collection[str] = (),
    any_model: bool = True,
    ollama: bool = True,
    tracer_provider: TracerProvider | None = None,
) -> FastAPI:
    """The app over these parts. ``api_keys`` is tenant -> key; ``key_file`` has further ones. Without both, every
    client is tenant "default" and needs no key, and the Host header must be an IP address, localhost or one of
    ``allowed_hosts``. Web pages of ``allowed_origins`` may call the API (CORS). ``ignore_unknown``: unknown fields of
    bodies are ignored instead of refused. ``line_seconds``, ``aliases``, ``any_model``: see ServerContext.
    ``vllm_names``: ``/metrics`` also has vLLM's metric names. Without a ``tracer_provider``, OpenTelemetry's
    environment variables say where spans are sent. ``thinking``: the default limit on reasoning. ``ollama``: whether
    Ollama's API is served too.
    """
    own = traces.provider_of_environment() if tracer_provider is None else None
    provider = tracer_provider or own
    app = App(
        title="warmturn",
        docs_url=None,  # both pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the client's Host header
        lifespan=lifespan,
        telemetry={
            "tracer_provider": provider,
            "exclude": traces.untraced,
            "auto_configure": False,
            "logs": False,  # they would hold what clients sent
            "operation_spans": False,
        },
        responses={"4XX": {"description": "Refused"}, "5XX": {"description": "Failed"}},
    )
    context = ServerContext(
        engine,
        log,
        tokens,
        served_name,
        template,
        thinking,
        tracer=traces.tracer(provider),
        line_seconds=line_seconds,
        aliases=frozenset(aliases),
        any_model=any_model,
    )
    context.metrics.log_opened(log.salvage, log.older)
    app.state.context = context
    app.state.background = BackgroundResponses(log)
    app.state.diagnostics = DiagnosticsTable()
    if vllm_names:
        context.metrics.registry.register(VllmNames(context.metrics, served_name))
    app.state.transfers = transfers
    app.state.telemetry = own
    app.state.ignore_unknown = ignore_unknown
    app.state.bodies = BodyMemory()
    endpoints = [*routers(without=() if ollama else ("ollama",))]
    for router in endpoints:
        app.include_router(router, dependencies=[Depends(only_known_parameters)])
    app.include_router(page_routes.router)
    error_responses.install(app)
    app.add_middleware(LastResort)
    turns = TurnRoutes(route for router in endpoints for route in router.routes)

    def before(rest: ASGIApp) -> ASGIApp:
        admitted = Overload(Dispatch(rest, turns), engine, turns)
        guard = Guard(admitted, Keyring(api_keys, key_file), Hosts(allowed_hosts), allowed_origins)
        access = Access(guard, context.metrics)
        return Cors(access, allowed_origins) if allowed_origins else access

    app.before = before
    return app


class App(FastAPI):
    """FastAPI with ``before``, a function that wraps the whole middleware stack in further ASGI apps."""

    before: Callable[[ASGIApp], ASGIApp]

    def build_middleware_stack(self) -> ASGIApp:
        return self.before(super().build_middleware_stack())


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    """At shutdown, ends background responses and sends the last spans."""
    yield
    await app.state.background.close()
    if app.state.telemetry is not None:
        await traces.close(app.state.telemetry)
