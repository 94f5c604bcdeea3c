"""Reading a request's body: everything that can be wrong with bytes before they are a request; and its URL."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from server import strict
from server.error_responses import NAME
from server.errors import ApiError, ClientLeft, bad_request

logger = logging.getLogger("warmturn.http")
MAX_BYTES = 8 * 1024 * 1024
MAX_DEPTH = 64
MAX_PARTS = 100_000
MAX_INTEGER = 1 << 63
INLINE_BYTES = 32 * 1024  # larger bodies are parsed on a thread


class ParsedRequest(Request):
    """A request whose body has been read and parsed; the framework asks it for both."""

    def __init__(self, request: Request, value: object) -> None:
        super().__init__(request.scope, request.receive)
        self._value = value

    async def body(self) -> bytes:
        return b"{}"  # there is one

    async def json(self) -> Any:
        return self._value


class JsonRoute(APIRoute):
    """A route that takes a JSON object and looks at it here, before the framework does."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def checked(request: Request) -> Response:
            if request.method in ("GET", "HEAD", "DELETE"):  # their bodies are not read
                strict.ignore_unknown(False)
                return await handler(request)
            response = await handler(ParsedRequest(request, await body_of(request)))
            tell_ignored()
            return response

        return checked


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object that a request carries; what is read of it next leaves unknown fields out, where that is told."""
    check_headers(request)
    data = await read(request)
    value = parse(data) if len(data) <= INLINE_BYTES else await run_in_threadpool(parse, data)
    strict.ignore_unknown(request.app.state.ignore_unknown)
    return value


def tell_ignored() -> None:
    """A line for who debugs about the fields that were left out."""
    if names := strict.ignored():
        logger.debug("unknown fields were left out: %s", ", ".join(names))


async def only_known_parameters(request: Request) -> None:
    """A dependency of every route that serves: what is in the URL behind the question mark is known, or refused
    by its name. Routes that have such parameters declare them as one strict model."""
    route = request.scope["route"]
    if isinstance(route, APIRoute) and not route.dependant.query_params and request.query_params:
        name = next(iter(request.query_params))
        raise RequestValidationError([{"type": "unknown", "loc": ("query",), "msg": "", "ctx": {"field": name}}])


def check_headers(request: Request) -> None:
    """Only plain JSON: a form or text body could come from any web page without its reader's consent."""
    media_type, _, parameters = request.headers.get("content-type", "").partition(";")
    if media_type.strip().lower() != "application/json":
        raise ApiError(415, "The body must be JSON: Content-Type: application/json.")
    charset = parameters.strip().lower()
    if charset.startswith("charset=") and charset.removeprefix("charset=").strip('"') not in ("utf-8", "utf8"):
        raise ApiError(415, "The body must be UTF-8.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "Compressed bodies are not taken.")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > MAX_BYTES:
        raise too_large()


async def read(request: Request) -> bytes:
    """The whole body, counted while it comes, as a chunked one has no length."""
    data = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        data += message.get("body", b"")
        if len(data) > MAX_BYTES:
            raise too_large()
        if not message.get("more_body", False):
            return bytes(data)


def too_large() -> ApiError:
    """413."""
    return ApiError(413, f"The body is larger than {MAX_BYTES} bytes.", code="request_too_large")


def parse(data: bytes) -> dict[str, Any]:
    """A JSON object. The decoder refuses bad UTF-8, NaN, infinities, lone surrogates and overlong integers."""
    try:
        value = msgspec.json.decode(data)
    except UnicodeDecodeError:
        raise bad_request("The body is not valid UTF-8.", code="invalid_json") from None
    except RecursionError:
        raise too_deep() from None
    except msgspec.ValidationError:
        raise bad_request("The body holds a number that is out of range.", code="invalid_json") from None
    except msgspec.DecodeError:
        if not data:
            raise bad_request(
                "The body is empty: it must be a JSON object, at least {}.", code="invalid_json"
            ) from None
        raise bad_request("The body is not valid JSON.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("The body must be a JSON object.", code="invalid_json")
    check_values(value)
    return value


def check_values(value: object) -> None:
    """Level by level instead of by recursion: at most MAX_DEPTH levels and MAX_PARTS objects, lists and names, as each
    of them is validated on the event loop, and integers that fit 64 bits."""
    level, parts = [value], 0
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        parts += len(level) + sum(len(container) for container in level if isinstance(container, dict))
        if parts > MAX_PARTS:
            raise too_many(value)
        for container in level:
            for item in container.values() if isinstance(container, dict) else container:  # type: ignore[attr-defined]
                if isinstance(item, (dict, list)):
                    below.append(item)
                elif isinstance(item, int) and not -MAX_INTEGER <= item < MAX_INTEGER:
                    raise bad_request("The body holds a number that is out of range.", code="invalid_json")
        if not below:
            return
        level = below
    raise too_deep()


def too_many(body: object) -> ApiError:
    """400, which names the longest of the body's fields."""
    assert isinstance(body, dict)
    holding = [name for name, held in body.items() if isinstance(held, (dict, list))]
    longest = max(holding, key=lambda name: len(body[name]), default="")
    message = f"The body holds more than {MAX_PARTS} objects, lists and names."
    return bad_request(message, longest if NAME.match(longest) else None, "invalid_json")


def too_deep() -> ApiError:
    """400."""
    return bad_request(f"The body is nested deeper than {MAX_DEPTH} levels.", code="invalid_json")
