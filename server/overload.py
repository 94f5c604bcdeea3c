"""Overload: what the engine would refuse is refused before anybody reads it.

A request that is parsed, rendered and tokenised only to find the queue full costs ten times what its refusal costs;
with enough of them the server has no time left for those that it serves."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from server.engine import Engine, TurnRefused
from server.errors import as_api_error, error_response

TURNS = re.compile(
    r"/v1/(chat/completions|completions|responses|messages|sessions/[^/]+/(chat/completions|regenerate))\Z"
)


class Overload:
    """ASGI middleware behind the one that knows the tenant: a POST that would become a turn gets its 429 at once while
    the tenant's turns find no place in the engine's queue. Its body is taken off the wire and dropped, as a client that
    still writes would not see the answer."""

    def __init__(self, app: ASGIApp, engine: Engine) -> None:
        self.app = app
        self.engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is None:
            await self.app(scope, receive, send)
            return
        message = await receive()
        while message["type"] == "http.request" and message.get("more_body", False):
            message = await receive()
        await error_response(as_api_error(refusal), scope)(scope, receive, send)

    def _refusal(self, scope: Scope) -> TurnRefused | None:
        if scope["type"] != "http" or scope["method"] != "POST" or not TURNS.match(scope["path"]):
            return None
        return self.engine.turns_away(scope["state"]["tenant"])
