"""``BodyRouting``: middleware of Ray's proxy, which reads the bodies of requests that name their conversation nowhere
else, before a replica is chosen, and tells the router by a header.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.body_size import MAX_BYTES
from server.http.routing import session_of
from server.lines.hints import MOST_CHARS, conversation_in, conversation_in_body
from server.log.identity import HEADER as SESSION

HEADER = "x-warmturn-conversation"  # a client's own is dropped


class Naming(msgspec.Struct):
    """The fields that may name a conversation; all others are skipped unread."""

    session_id: Any = None
    conversation: Any = None
    previous_response_id: Any = None
    prompt_cache_key: Any = None
    metadata: Any = None
    client_metadata: Any = None


class BodyRouting:
    """The middleware. A body is read once: what was read of it is handed on as it came."""

    def __init__(self, app: ASGIApp, most: int = MAX_BYTES) -> None:
        """``most``: bytes; a longer body is not waited for."""
        self._app = app
        self._most = most
        self._decode = msgspec.json.Decoder(Naming).decode

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = [(name, value) for name, value in scope["headers"] if name != HEADER.encode()]
        scope = {**scope, "headers": headers}
        if not asks_its_body(scope):
            return await self._app(scope, receive, send)
        read = await self._read(receive)
        if (named := self._named(read)) is not None:
            scope["headers"] = [*headers, (HEADER.encode(), named.encode("latin-1", "replace"))]
        return await self._app(scope, replaying(read, receive), send)

    async def _read(self, receive: Receive) -> list[Message]:
        """The messages of the body, up to its end or to ``most`` bytes."""
        read: list[Message] = []
        size = 0
        while size <= self._most:
            message = await receive()
            read.append(message)
            size += len(message.get("body", b""))
            if not message.get("more_body", False):
                break
        return read

    def _named(self, read: list[Message]) -> str | None:
        """The session or conversation that a body names; None if there is none, or it is no JSON or not complete."""
        if read[-1]["type"] != "http.request" or read[-1].get("more_body", False):
            return None
        try:
            return named_in(self._decode(b"".join(message.get("body", b"") for message in read)))
        except msgspec.DecodeError:
            return None


def asks_its_body(scope: Scope) -> bool:
    """Whether only the body of a request can name its conversation."""
    headers = Headers(scope=scope)
    if scope["method"] != "POST" or "json" not in headers.get("content-type", ""):
        return False
    elsewhere = headers.get(SESSION) or session_of(scope["path"], scope.get("query_string", b""))
    return not (elsewhere or conversation_in(headers))


def replaying(read: list[Message], receive: Receive) -> Receive:
    """Receives what was ``read``, then what comes."""
    left = iter(read)

    async def replay() -> Message:
        message = next(left, None)
        return await receive() if message is None else message

    return replay


def named_in(body: Naming) -> str | None:
    """The session that a body names, else the client's own id of its conversation."""
    chain = body.conversation.get("id") if isinstance(body.conversation, dict) else body.conversation
    if isinstance(body.session_id, str) and 0 < len(body.session_id) <= MOST_CHARS:
        return body.session_id
    for folder, id in (("conversations", chain), ("responses", body.previous_response_id)):
        if isinstance(id, str) and len(id) <= MOST_CHARS and (found := session_of(f"/v1/{folder}/{id}")) is not None:
            return found
    fields = {"prompt_cache_key": body.prompt_cache_key}
    for prefix, given in (("metadata", body.metadata), ("client_metadata", body.client_metadata)):
        fields |= {f"{prefix}.{name}": value for name, value in given.items()} if isinstance(given, Mapping) else {}
    return conversation_in_body({name: value for name, value in fields.items() if isinstance(value, str)})


def middlewares() -> list[Middleware]:
    """What Ray's proxy calls, see ``PROXY_CALLBACK`` of ``ray_serve``."""
    return [Middleware(BodyRouting)]
