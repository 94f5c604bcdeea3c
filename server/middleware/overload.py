"""Refuses requests early while the engine's queue is full, before their bodies are parsed.

Parsing, rendering and tokenising a request only to find the queue full costs ten times as much as refusing it here;
many such requests would leave no CPU time for the turns that run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Protocol

from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from server.engine.engine import TurnRefused
from server.http.body import is_turn_route
from server.http.error_responses import as_api_error, error_response


class TurnRoutes:
    """Finds the route of a request that may become a turn. ``by_path`` has the routes by their path templates."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        """``routes``: all of the app; those of turns are marked by ``takes_turn``."""
        self.by_path = {route.path: route for route in routes if is_turn_route(route)}
        self._patterns = [(route.path_regex, path) for path, route in self.by_path.items() if "{" in path]

    def template_of(self, scope: Scope) -> str | None:
        """The path template of a request's route; None for a request that becomes no turn."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return None
        path = scope["path"]
        if path in self.by_path and "{" not in path:
            return str(path)
        return next((template for pattern, template in self._patterns if pattern.match(path)), None)


class QueueGate(Protocol):
    """What knows whether a turn of a tenant would find a place; see ``Engine``."""

    def turns_away(self, tenant: str) -> TurnRefused | None: ...
    def reading(self, tenant: str) -> AbstractContextManager[None]: ...


class Overload:
    """ASGI middleware after authentication: a POST that would become a turn gets its 429 at once while the engine's
    queue has no place for the tenant. Its body is read and dropped, as a client that is still writing would not see the
    answer.
    """

    def __init__(self, app: ASGIApp, engines: QueueGate, routes: TurnRoutes) -> None:
        self.app = app
        self.engines = engines
        self._routes = routes

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        tenant = scope.get("state", {}).get("tenant")  # none on the paths that everybody may take
        template = None if tenant is None else self._routes.template_of(scope)
        if template is None:
            return self.app(scope, receive, send)
        refusal = self.engines.turns_away(tenant)
        if refusal is None:
            return self._read(tenant, scope, receive, send)
        scope["route"] = SimpleNamespace(path=template)  # who counts the answer finds it where routing leaves it
        return refuse(refusal, scope, receive, send)

    async def _read(self, tenant: str, scope: Scope, receive: Receive, send: Send) -> None:
        with self.engines.reading(tenant):
            await self.app(scope, receive, send)


async def refuse(refusal: TurnRefused, scope: Scope, receive: Receive, send: Send) -> None:
    """Send the 429 after reading the body."""
    message = await receive()
    while message["type"] == "http.request" and message.get("more_body", False):
        message = await receive()
    await error_response(as_api_error(refusal), scope)(scope, receive, send)
