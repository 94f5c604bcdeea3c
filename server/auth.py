"""Who calls: bearer keys, one per tenant, checked before anything else looks at the request."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ApiError

OPEN_PATHS = frozenset({"/health"})  # exact matches of scope["path"]; everything else needs a key
DEFAULT_TENANT = "default"


class Keyring:
    """The tenants and the SHA-256 digests of their keys; the keys themselves are not kept."""

    def __init__(self, api_keys: Mapping[str, str]) -> None:
        self._digests = [(tenant, digest(key.encode())) for tenant, key in api_keys.items()]

    def tenant(self, authorization: bytes | None) -> str | None:
        """Whose key an Authorization header carries; without any configured key everybody is one tenant."""
        if not self._digests:
            return DEFAULT_TENANT
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        given = digest(key.strip())
        found = None
        for tenant, known in self._digests:  # all of them, so that the time tells nothing
            if hmac.compare_digest(known, given):
                found = tenant
        return found


def digest(key: bytes) -> bytes:
    """SHA-256."""
    return hashlib.sha256(key).digest()


class Guard:
    """ASGI middleware: a request without a valid key gets a 401; one with it carries ``state["tenant"]``."""

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self.app = app
        self.keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no websockets here
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["path"] not in OPEN_PATHS:
            values = Headers(scope=scope).getlist("authorization")
            tenant = self.keyring.tenant(values[0].encode("latin-1") if len(values) == 1 else None)
            if tenant is None:
                await denied(bool(values))(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self.app(scope, receive, send)


def denied(given: bool) -> Response:
    """The 401: says whether a key was missing or wrong, and nothing about the route."""
    message = "The API key is not valid." if given else "An API key is needed: Authorization: Bearer KEY."
    error = ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
    return Response(error.encoded(), 401, headers=error.headers, media_type="application/json")
