"""Fast routing of requests that become turns: they are parsed and passed to their endpoints without FastAPI's
dependency resolution; endpoints are inspected once, at start.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import cache, partial
from re import Pattern
from typing import Any, get_type_hints

from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.body import log_ignored, read_json_object, tasks_of
from server.http.error_responses import ANSWERED, on_error
from server.http.ollama_errors import speaks_ollama
from server.middleware.overload import TurnRoutes
from server.models.loading_stream import answer_or_progress
from server.models.registry import ModelRegistry, allowed_models
from server.schemas.strict import validate


class Endpoint:
    """A route whose endpoint takes a JSON body, path parameters and optional query parameters, and nothing else.
    ``pattern`` matches its path.
    """

    def __init__(self, route: APIRoute) -> None:
        """Raises TypeError where the endpoint takes something else."""
        self.route = route
        self.pattern: Pattern[str] = route.path_regex
        self.tasks = tasks_of(route.endpoint)
        self._call: Callable[..., Awaitable[Response]] = route.endpoint
        self._absent: dict[str, Any] = {}
        bodies = []
        for name, kind in parameters_of(route.endpoint).items():
            if name == "body" and issubclass(kind, BaseModel):
                bodies.append(kind)
            elif name == "query" and issubclass(kind, BaseModel):
                self._absent[name] = kind()
            elif not (kind is Request or (kind is str and name in route.param_convertors)):
                raise TypeError(f"{route.path}: {name}")
        (self._model,) = bodies

    def names_in(self, path: str) -> dict[str, str]:
        """The path parameters of a path that the route matches."""
        found = self.pattern.match(path)
        assert found is not None
        return found.groupdict()

    async def respond(self, request: Request, named: dict[str, str], models: ModelRegistry) -> Response:
        """The endpoint's response; ``named`` are the path parameters. The request's model is loaded if it is not, while
        a client of a stream is told how far that is.
        """
        body: Any = validate(self._model, await read_json_object(request))
        model = models.find(body.model, allowed_models(request), self.tasks)
        if model.is_loaded or not getattr(body, "stream", False) or speaks_ollama(request.scope["path"]):
            return await self._answer(request, body, named, models)
        answer = partial(self._answer, request, body, named, models)
        return await answer_or_progress(answer, request.scope, partial(getattr, model, "stage"))

    async def _answer(self, request: Request, body: Any, named: dict[str, str], models: ModelRegistry) -> Response:
        async with models.using(request, body.model, request.receive, self.tasks):
            response = await self._call(body=body, request=request, **named, **self._absent)
        log_ignored()
        return response


@cache
def parameters_of(endpoint: Callable[..., Any]) -> dict[str, Any]:
    """Their types, by their names."""
    hints = get_type_hints(endpoint)
    return {name: hints[name] for name in inspect.signature(endpoint).parameters}


class Dispatch:
    """ASGI app in front of FastAPI's. Requests that become turns go directly to their endpoints. Other requests go to
    ``app``, and so do requests with a query and requests that FastAPI traces.
    """

    def __init__(self, app: ASGIApp, routes: TurnRoutes, models: ModelRegistry) -> None:
        self.app = app
        self._routes = routes
        self._models = models
        self._endpoints = {path: Endpoint(route) for path, route in routes.by_path.items()}

    async def free_for(self, path: str, name: str, allowed: frozenset[str] | None) -> None:
        """Wait until the model that a request to this path means by a name can be asked, see ``ModelRegistry``."""
        await self._models.free_for(name, allowed, self._endpoints[path].tasks)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        plain = not scope.get("query_string") and scope.get("fastapi.telemetry") is None
        template = self._routes.template_of(scope) if plain else None
        if template is None:
            return self.app(scope, receive, send)
        return run(self._endpoints[template], self._models, scope, receive, send)


async def run(endpoint: Endpoint, models: ModelRegistry, scope: Scope, receive: Receive, send: Send) -> None:
    """Call the endpoint and send its response, or the error response."""
    named = endpoint.names_in(scope["path"])
    scope["route"], scope["endpoint"], scope["path_params"] = endpoint.route, endpoint.route.endpoint, named
    request = Request(scope, receive, send)
    try:
        response = await endpoint.respond(request, named, models)
    except ANSWERED as error:
        response = await on_error(request, error)
    await response(scope, receive, send)
