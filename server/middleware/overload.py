"""Overload: what the engine would refuse is refused before anybody reads it.

A request that is parsed, rendered and tokenised only to find the queue full costs ten times what its refusal costs;
with enough of them the server has no time left for those that it serves."""

from __future__ import annotations

from collections.abc import Awaitable
from types import SimpleNamespace

from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from server.engine.engine import Engine, TurnRefused
from server.http.error_responses import as_api_error, error_response

TURNS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/sessions/{session_id}/chat/completions",
    "/v1/sessions/{session_id}/regenerate",
)

EXACT = frozenset(template for template in TURNS if "{" not in template)
PATTERNS = [(compile_path(template)[0], template) for template in TURNS if "{" in template]


def template_of(scope: Scope) -> str | None:
    """That of the path, where the request may become a turn."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    path = scope["path"]
    if path in EXACT:
        return str(path)
    return next((template for pattern, template in PATTERNS if pattern.match(path)), None)


class Overload:
    """ASGI middleware behind the one that knows the tenant: a POST that would become a turn gets its 429 at once while
    the tenant's turns find no place in the engine's queue. Its body is taken off the wire and dropped, as a client that
    still writes would not see the answer."""

    def __init__(self, app: ASGIApp, engine: Engine) -> None:
        self.app = app
        self.engine = engine

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        tenant = scope.get("state", {}).get("tenant")  # none on the paths that everybody may take
        template = None if tenant is None else template_of(scope)
        if template is None:
            return self.app(scope, receive, send)
        refusal = self.engine.turns_away(tenant)
        if refusal is None:
            return self._read(tenant, scope, receive, send)
        scope["route"] = SimpleNamespace(path=template)  # who counts the answer finds it where routing leaves it
        return refuse(refusal, scope, receive, send)

    async def _read(self, tenant: str, scope: Scope, receive: Receive, send: Send) -> None:
        with self.engine.reading(tenant):
            await self.app(scope, receive, send)


async def refuse(refusal: TurnRefused, scope: Scope, receive: Receive, send: Send) -> None:
    """The 429, once the body is off the wire."""
    message = await receive()
    while message["type"] == "http.request" and message.get("more_body", False):
        message = await receive()
    await error_response(as_api_error(refusal), scope)(scope, receive, send)
