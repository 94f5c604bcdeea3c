"""Reads and checks a request's headers, body and query before it is parsed as a request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, Protocol, TypeGuard, TypeVar, get_type_hints

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import Receive

from scheduler.model_task import Task
from server.errors import ApiError, ClientLeft
from server.http.body_memory import SMALL, BodyMemory
from server.http.body_size import MAX_BYTES
from server.http.media_admission import admit_media
from server.schemas import strict
from server.schemas.adaptations import begin_adaptations
from server.schemas.json_body import parse

logger = logging.getLogger("warmturn.http")
INLINE_BYTES = 32 * 1024  # larger bodies are parsed on a thread


Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def takes_turn(endpoint: Endpoint) -> Endpoint:
    """Decorator, below that of the route: marks an endpoint whose requests become turns. They are refused early while
    the engine's queue is full, and are routed by ``server.dispatch``.
    """
    return asks("generate")(endpoint)


def asks(*tasks: Task) -> Callable[[Endpoint], Endpoint]:
    """Decorator, below that of the route: marks an endpoint whose requests an engine computes. The model that a request
    names must be for one of these tasks; a request that names none means a model for the first of them, where there is
    one.
    """

    def mark(endpoint: Endpoint) -> Endpoint:
        endpoint.takes_turn, endpoint.tasks = True, tasks  # type: ignore[attr-defined]
        return endpoint

    return mark


def tasks_of(endpoint: object) -> tuple[Task, ...]:
    """The tasks of an endpoint; empty: it takes any model."""
    found: tuple[Task, ...] = getattr(endpoint, "tasks", ())
    return found


def is_turn_route(route: object) -> TypeGuard[APIRoute]:
    """Whether a route's endpoint is marked by ``takes_turn``."""
    return isinstance(route, APIRoute) and getattr(route.endpoint, "takes_turn", False)


class ParsedRequest(Request):
    """A request whose body has been read and parsed already; FastAPI gets both from here."""

    def __init__(self, request: Request, value: object) -> None:
        super().__init__(request.scope, request.receive)
        self._value = value

    @property
    def headers(self) -> Headers:
        rest = [(name, value) for name, value in self.scope["headers"] if name != b"content-type"]
        return Headers(raw=[*rest, (b"content-type", b"application/json")])  # FastAPI takes JSON under no other

    async def body(self) -> bytes:
        return b"{}"  # there is one

    async def json(self) -> Any:
        return self._value


class ModelChooser(Protocol):
    """What gives a request the context of the model that it names: the app's ``state.models``."""

    def using(
        self, connection: HTTPConnection, name: str, receive: Receive | None = None, tasks: tuple[Task, ...] = ()
    ) -> AbstractAsyncContextManager[object]: ...


class JsonRoute(APIRoute):
    """A route whose JSON body is read and checked here, before FastAPI sees it. If it names a model, that is the
    request's.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        fields = getattr(get_type_hints(self.endpoint).get("body"), "model_fields", {})
        tasks = tasks_of(self.endpoint)

        async def check(request: Request) -> Response:
            if request.method in ("GET", "HEAD", "DELETE"):  # their bodies are not read
                strict.ignore_unknown(False)
                return await handler(request)
            await only_known_parameters(request)  # before a model is chosen, or loaded
            value = await read_json_object(request)
            parsed = ParsedRequest(request, value)
            if "model" in fields:
                models: ModelChooser = request.app.state.models
                name = value.get("model")
                async with models.using(request, name if isinstance(name, str) else "", request.receive, tasks):
                    response = await handler(parsed)
            else:
                response = await handler(parsed)
            log_ignored()
            return response

        return check


async def read_json_object(request: Request) -> dict[str, Any]:
    """The JSON object in a request's body, with its media read and checked (``admit_media``). Also sets whether unknown
    fields are ignored when it is validated.
    """
    size = check_headers(request)
    async with AsyncExitStack() as held:
        data = await read_bytes(request, size, held)
        value = parse(data) if len(data) <= INLINE_BYTES else await run_in_threadpool(parse, data)
        del data
        strict.ignore_unknown(request.app.state.ignore_unknown)
        begin_adaptations()
        await admit_media(request, value)
    return value


def log_ignored() -> None:
    """Log the unknown fields that were ignored, at debug level."""
    if names := strict.ignored_fields():
        logger.debug("unknown fields were left out: %s", ", ".join(names))


async def only_known_parameters(request: HTTPConnection) -> None:
    """A dependency of all routes: refuses unknown query parameters by name. Routes with query parameters declare them
    as one strict model.
    """
    route = request.scope["route"]
    if isinstance(route, APIRoute) and not route.dependant.query_params and request.query_params:
        name = next(iter(request.query_params))
        raise RequestValidationError([{"type": "unknown", "loc": ("query",), "msg": "", "ctx": {"field": name}}])


def is_from_curl(request: Request, media_type: str) -> bool:
    """Whether JSON may have another content type: as ``curl -d`` names it, which Ollama takes and its documentation
    uses, and not from a web page. Browsers send Origin with each POST, and a page cannot leave it out.
    """
    as_curl = media_type in ("", "application/x-www-form-urlencoded") and "origin" not in request.headers
    return as_curl and request.url.path.startswith("/api/")


def check_headers(request: Request) -> int | None:
    """Refuse any content type but plain JSON: web pages can send forms and text without a CORS preflight. Returns the
    body's length in bytes; None for a chunked body. Raises a 415 or a 413.
    """
    media_type, _, parameters = request.headers.get("content-type", "").partition(";")
    media_type = media_type.strip().lower()
    if media_type != "application/json" and not is_from_curl(request, media_type):
        raise ApiError(415, "The body must be JSON: Content-Type: application/json.")
    charset = parameters.strip().lower()
    if charset.startswith("charset=") and charset.removeprefix("charset=").strip('"') not in ("utf-8", "utf8"):
        raise ApiError(415, "The body must be UTF-8.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "Compressed bodies are not supported.")
    length = request.headers.get("content-length", "")
    if not length.isdecimal():
        return None
    if int(length[:20]) > MAX_BYTES:
        raise request_too_large()
    return int(length)


async def read_bytes(request: Request, size: int | None, held: AsyncExitStack) -> bytes:
    """The whole body, of ``size`` bytes. A chunked body has no size (None): it is counted while it is read. The memory
    of a large one is held until ``held`` is closed. Raises a 413 or ClientLeft.
    """
    bodies: BodyMemory = request.app.state.bodies
    if size is not None:
        await held.enter_async_context(bodies.hold(size))
    data = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        data += message.get("body", b"")
        if size is None and len(data) > SMALL:
            size = MAX_BYTES
            await held.enter_async_context(bodies.hold(size))
        if len(data) > MAX_BYTES:
            raise request_too_large()
        if not message.get("more_body", False):
            return bytes(data)


def request_too_large() -> ApiError:
    return ApiError(413, f"The body is larger than {MAX_BYTES} bytes.", code="request_too_large")
