"""Authentication: API keys, one per tenant; without keys, a check of the Host header.

A key comes as ``Authorization: Bearer KEY`` or, as Anthropic's clients send it, as ``x-api-key``.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError
from server.http import page
from server.http.error_responses import error_response
from server.log.quota import NO_QUOTA, Quota, begin_quota
from server.middleware.key_file import KeyEntry, KeyFile, id_of
from server.middleware.rate_limit import RateLimit

OPEN_PATHS = frozenset(
    {"/health", "/health/live", "/v1/shared"}
)  # exact matches of scope["path"]; everything else needs a key
DEFAULT_TENANT = "default"
ANY = "*"  # every origin
NO_LIMIT = RateLimit(None, None)


@dataclass(frozen=True)
class KeyAccess:
    """What a key gives: the data of its tenant, within its limits, and the ``models`` of these names; None: all.
    ``key``: its id.
    """

    tenant: str
    limit: RateLimit
    models: frozenset[str] | None = None
    key: str = ""
    quota: Quota = NO_QUOTA


class Keyring:
    """The SHA-256 digests of all keys and what each gives; the keys themselves are not kept."""

    def __init__(self, api_keys: Mapping[str, str], file: KeyFile | None = None) -> None:
        digests = {digest(key.encode()): tenant for tenant, key in api_keys.items()}
        self._fixed = {known: KeyAccess(tenant, NO_LIMIT, key=id_of(known.hex())) for known, tenant in digests.items()}
        self._file = file
        self._entries: dict[KeyEntry, KeyAccess] = {}
        self._known = self._fixed
        self._open = KeyAccess(DEFAULT_TENANT, NO_LIMIT)
        if file is not None:
            self._read(file.entries)

    def __bool__(self) -> bool:
        return bool(self._fixed) or self._file is not None

    def access(self, authorization: bytes | None) -> KeyAccess | None:
        """What the key in an Authorization header gives; None if it is wrong. Without configured keys everything is
        one tenant's.
        """
        if not self:
            return self._open
        if self._file is not None and self._file.has_changed():
            self._read(self._file.entries)
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        given = digest(key.strip())
        found = None
        for known, access in self._known.items():  # all of them, so that the time tells nothing
            if hmac.compare_digest(known, given):
                found = access
        return found

    def find(self, tenant: str, key: str) -> KeyAccess | None:
        """What the key of this id gives, if it is still one of this tenant; without configured keys, everything."""
        if not self:
            return self._open if (tenant, key) == (self._open.tenant, self._open.key) else None
        if self._file is not None and self._file.has_changed():
            self._read(self._file.entries)
        return next((one for one in self._known.values() if (one.tenant, one.key) == (tenant, key)), None)

    def _read(self, entries: Sequence[KeyEntry]) -> None:
        """Take the keys of the file. What is left of a limit stays, where the entry is the same."""
        self._entries = {entry: self._entries.get(entry) or access_of(entry) for entry in entries}
        from_file = {bytes.fromhex(entry.sha256): access for entry, access in self._entries.items()}
        self._known = {**from_file, **self._fixed}


def access_of(entry: KeyEntry) -> KeyAccess:
    """What the key of an entry gives, with nothing used of its limits."""
    limit = RateLimit(entry.requests_per_minute, entry.tokens_per_minute)
    return KeyAccess(entry.tenant, limit, entry.allowed, entry.id, Quota(entry.max_sessions, entry.max_bytes))


def digest(key: bytes) -> bytes:
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
    ``hosts`` gets a 403. Other requests get ``state["tenant"]``. A WebSocket or a form of a page of another origin gets
    a 403, unless that is one of ``origins``.
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
            if needs_no_preflight(scope, headers) and not self._is_own_page(headers):
                return error_response(wrong_origin_error(), scope)(scope, receive, send)
            if scope["type"] == "http" and page.is_page_request(scope):  # files, by their exact paths
                return self.app(scope, receive, send)
            values = headers.getlist("authorization") or [f"Bearer {key}" for key in headers.getlist("x-api-key")]
            access = self.keyring.access(values[0].encode("latin-1") if len(values) == 1 else None)
            if access is None:
                return error_response(missing_key_error(bool(values)), scope)(scope, receive, send)
            scope.setdefault("state", {}).update(
                tenant=access.tenant, key=access.key, rate_limit=access.limit, models=access.models
            )
            begin_quota(access.quota)
            if scope["type"] == "http" and access.limit:
                return self.app(scope, receive, partial(send_limited, send, access.limit))
        return self.app(scope, receive, send)

    def _is_own_page(self, headers: Headers) -> bool:
        """Whether no page of another origin asks."""
        origin = headers.get("origin")
        if origin is None or not self.origins.isdisjoint({ANY, origin.lower()}):
            return True
        return urlsplit(origin.lower()).netloc == headers.get("host", "").lower()


def needs_no_preflight(scope: Scope, headers: Headers) -> bool:
    """Whether browsers let any page send this: a WebSocket (RFC 6455, 10.2) or a form (Fetch standard)."""
    return scope["type"] == "websocket" or headers.get("content-type", "").lower().startswith("multipart/")


async def send_limited(send: Send, limit: RateLimit, message: Message) -> None:
    """Send a message of an answer; the first one tells what is left of the key's limits."""
    if message["type"] == "http.response.start":
        MutableHeaders(scope=message).update(limit.headers())
    await send(message)


def missing_key_error(given: bool) -> ApiError:
    """The 401: says whether a key was missing or wrong, and nothing about the route."""
    message = "The API key is not valid." if given else "An API key is needed: Authorization: Bearer KEY."
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def wrong_origin_error() -> ApiError:
    """The 403 for a WebSocket or a form of a page of another origin."""
    message = "Pages of this origin may not open a WebSocket or send a form here: see --allow-origin."
    return ApiError(403, message, code="origin_not_allowed")


def wrong_host_error() -> ApiError:
    """The 403 for a host name that is not allowed."""
    message = "This server has no API keys and does not answer to this host name: see --allowed-host."
    return ApiError(403, message, code="host_not_allowed")
