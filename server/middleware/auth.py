"""Authentication: API keys, one per tenant; without keys, a check of the Host header.

A key comes as ``Authorization: Bearer KEY`` or, as Anthropic's clients send it, as ``x-api-key``.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Awaitable, Collection, Mapping, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ApiError
from server.http import page
from server.http.error_responses import error_response

OPEN_PATHS = frozenset({"/health", "/health/live"})  # exact matches of scope["path"]; everything else needs a key
DEFAULT_TENANT = "default"
ANY = "*"  # every origin


class Keyring:
    """The tenants and the SHA-256 digests of their keys; the keys themselves are not kept."""

    def __init__(self, api_keys: Mapping[str, str]) -> None:
        self._digests = [(tenant, digest(key.encode())) for tenant, key in api_keys.items()]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def tenant(self, authorization: bytes | None) -> str | None:
        """The tenant whose key is in an Authorization header; None if it is wrong. Without configured keys, the one
        tenant.
        """
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


class Hosts:
    """The host names that a server without keys accepts. Otherwise a web page could point a name of its own at this
    machine and be of the same origin as the server (DNS rebinding); IP addresses are always accepted.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = {"localhost", *names}

    def allow(self, given: Sequence[str]) -> bool:
        """Whether a request's Host headers are one allowed name or address, or none, which no browser sends."""
        if not given or "*" in self._names:
            return True
        host = given[0].lower()
        if host.startswith("["):
            name, bracket, _ = host[1:].partition("]")
            name = name if bracket else ""
        else:
            name = host.partition(":")[0].removesuffix(".")
        return len(given) == 1 and (name in self._names or is_address(name))


def is_address(name: str) -> bool:
    """Whether it is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Guard:
    """ASGI middleware: a request without a valid key gets a 401; without configured keys, one whose Host is not among
    ``hosts`` gets a 403. Other requests get ``state["tenant"]``. A WebSocket that a page of another origin opens gets a
    403, unless that is one of ``origins``.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring, hosts: Hosts, origins: Collection[str] = ()) -> None:
        self.app = app
        self.origins = frozenset(origins)
        self.keyring = keyring
        self.hosts = hosts

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "lifespan":
            return self.app(scope, receive, send)
        if scope["path"] not in OPEN_PATHS:
            headers = Headers(scope=scope)
            if not self.keyring and not self.hosts.allow(headers.getlist("host")):
                return error_response(wrong_host_error(), scope)(scope, receive, send)
            if scope["type"] == "websocket" and not self._may_open_sockets(headers):
                return error_response(wrong_origin_error(), scope)(scope, receive, send)
            if scope["type"] == "http" and page.is_page_request(scope):  # files, by their exact paths
                return self.app(scope, receive, send)
            values = headers.getlist("authorization") or [f"Bearer {key}" for key in headers.getlist("x-api-key")]
            tenant = self.keyring.tenant(values[0].encode("latin-1") if len(values) == 1 else None)
            if tenant is None:
                return error_response(missing_key_error(bool(values)), scope)(scope, receive, send)
            scope.setdefault("state", {})["tenant"] = tenant
        return self.app(scope, receive, send)

    def _may_open_sockets(self, headers: Headers) -> bool:
        """Whether no page of another origin opens the WebSocket; browsers let any page try (RFC 6455, 10.2)."""
        origin = headers.get("origin")
        if origin is None or not self.origins.isdisjoint({ANY, origin.lower()}):
            return True
        return urlsplit(origin.lower()).netloc == headers.get("host", "").lower()


def missing_key_error(given: bool) -> ApiError:
    """The 401: says whether a key was missing or wrong, and nothing about the route."""
    message = "The API key is not valid." if given else "An API key is needed: Authorization: Bearer KEY."
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def wrong_origin_error() -> ApiError:
    """The 403 for a WebSocket that a page of another origin opens."""
    message = "Pages of this origin may not open a WebSocket here: see --allow-origin."
    return ApiError(403, message, code="origin_not_allowed")


def wrong_host_error() -> ApiError:
    """The 403 for a host name that is not allowed."""
    message = "This server has no API keys and does not answer to this host name: see --allowed-host."
    return ApiError(403, message, code="host_not_allowed")
