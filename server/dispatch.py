"""Fast routing of requests that become turns: they are parsed and passed to their endpoints without FastAPI's
dependency resolution; endpoints are inspected once, at start.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from re import Pattern
from typing import Any, get_type_hints

from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.body import log_ignored, read_json_object
from server.http.error_responses import ANSWERED, on_error
from server.middleware.overload import TurnRoutes
from server.schemas.strict import validated


class Endpoint:
    """A route whose endpoint takes a JSON body, path parameters and optional query parameters, and nothing else.
    ``pattern`` matches its path.
    """

    def __init__(self, route: APIRoute) -> None:
        """Raises TypeError where the endpoint takes something else."""
        self.route = route
        self.pattern: Pattern[str] = route.path_regex
        self._call: Callable[..., Awaitable[Response]] = route.endpoint
        self._absent: dict[str, Any] = {}
        hints = get_type_hints(route.endpoint)
        bodies = []
        for name in inspect.signature(route.endpoint).parameters:
            kind = hints[name]
            if name == "body" and issubclass(kind, BaseModel):
                bodies.append(kind)
            elif name == "query" and issubclass(kind, BaseModel):
                self._absent[name] = kind()
            elif not (kind is Request or (kind is str and name in route.param_convertors)):
                raise TypeError(f"{route.path}: {name}")
        (self._model,) = bodies

    async def respond(self, request: Request, named: dict[str, str]) -> Response:
        """The endpoint's response; ``named`` are the path parameters."""
        body = validated(self._model, await read_json_object(request))
        response = await self._call(body=body, request=request, **named, **self._absent)
        log_ignored()
        return response


class Dispatch:
    """ASGI app in front of FastAPI's. Requests that become turns go directly to their endpoints. Other requests go to
    ``app``, and so do requests with a query and requests that FastAPI traces.
    """

    def __init__(self, app: ASGIApp, routes: TurnRoutes) -> None:
        self.app = app
        self._routes = routes
        self._endpoints = {path: Endpoint(route) for path, route in routes.by_path.items()}

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        plain = not scope.get("query_string") and scope.get("fastapi.telemetry") is None
        template = self._routes.template_of(scope) if plain else None
        if template is None:
            return self.app(scope, receive, send)
        return run(self._endpoints[template], scope, receive, send)


async def run(endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
    """Call the endpoint and send its response, or the error response."""
    found = endpoint.pattern.match(scope["path"])
    assert found is not None
    scope["route"], scope["endpoint"], scope["path_params"] = endpoint.route, endpoint.route.endpoint, found.groupdict()
    request = Request(scope, receive, send)
    try:
        response = await endpoint.respond(request, found.groupdict())
    except ANSWERED as error:
        response = await on_error(request, error)
    await response(scope, receive, send)
