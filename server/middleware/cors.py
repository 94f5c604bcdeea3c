"""CORS: which web pages of other origins may call the API (Fetch standard, section 3.3)."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHODS = "DELETE, GET, HEAD, PATCH, POST, PUT"
EXPOSED = "idempotent-replayed, request-id, retry-after, x-request-id, x-session-id"  # headers of ours that pages read
MAX_AGE = "600"  # seconds that a browser need not ask again
ANY = "*"


class Cors:
    """ASGI middleware: answers to pages of ``origins`` ("*": of any origin) get CORS headers, errors and streams too.
    Keys are sent in headers, not as cookies, so credentials are never allowed.

    A preflight has no key: it is answered here, before keys and hosts are checked, and is not counted. The request
    after it is checked like any other. Preflights of other origins, or of none, are treated as without CORS.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self.app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._origins:
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        allowed = origin is not None and (ANY in self._origins or origin.lower() in self._origins)
        allow = ANY if ANY in self._origins else origin if allowed else None

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                told = MutableHeaders(scope=message)
                if ANY not in self._origins:
                    told.add_vary_header("Origin")  # a cache must not give one origin's answer to another
                if allowed and allow is not None:
                    told["access-control-allow-origin"] = allow
                    told["access-control-expose-headers"] = EXPOSED
            await send(message)

        if allowed and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await sending({"type": "http.response.start", "status": 204, "headers": leave(headers)})
            await send({"type": "http.response.body"})
            return
        await self.app(scope, receive, sending)


def leave(asked: Headers) -> list[tuple[bytes, bytes]]:
    """The headers of the answer to a preflight: all methods, and all request headers that the page asks for."""
    given = {"access-control-allow-methods": METHODS, "access-control-max-age": MAX_AGE}
    if wanted := asked.get("access-control-request-headers"):
        given["access-control-allow-headers"] = wanted
    if asked.get("access-control-request-private-network") == "true":  # a public page that calls this machine
        given["access-control-allow-private-network"] = "true"
    return [(name.encode(), value.encode("latin-1")) for name, value in given.items()]
