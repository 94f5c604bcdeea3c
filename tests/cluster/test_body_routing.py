"""What Ray's proxy reads in bodies, so that its router finds the replica of a conversation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from server.cluster.body_routing import HEADER, BodyRouting

JSON = {"content-type": "application/json"}
CLAUDE = json.dumps({"device_id": "d", "session_id": "s-1"})
BODIES: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt_cache_key": "k"}, "k"),
    ({"session_id": "alice", "prompt_cache_key": "k"}, "alice"),
    ({"previous_response_id": "resp_chain-5f_9a", "prompt_cache_key": "k"}, "chain-5f"),
    ({"conversation": "conv_7c"}, "7c"),
    ({"conversation": {"id": "conv_7c"}, "previous_response_id": None}, "7c"),
    ({"metadata": {"user_id": "user_1_account_2_session_s-1"}}, "s-1"),
    ({"metadata": {"user_id": CLAUDE}, "prompt_cache_key": "k"}, "s-1"),
    ({"metadata": {"user_id": "somebody"}}, None),
    ({"client_metadata": {"thread_id": "t", "session_id": "s"}}, "t"),
    ({"client_metadata": {"x-codex-window-id": "t:3"}}, "t"),
    ({"metadata": {"session_id": "m"}}, "m"),
    ({"prompt_cache_key": 7, "metadata": "x", "client_metadata": [1], "conversation": 3, "session_id": {}}, None),
    ({"prompt_cache_key": "x" * 600}, None),
    ({"previous_response_id": "other"}, None),
    ({"messages": [{"role": "user", "content": "hi"}]}, None),
]


class Proxy:
    """What stands behind the middleware: it keeps the head and the body that come through."""

    def __init__(self, most: int = 1 << 20) -> None:
        self.scope: Scope = {}
        self.body = b""
        self.left = False
        self._app = BodyRouting(self, most)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, more = scope, True
        while more:
            message = await receive()
            self.left = message["type"] == "http.disconnect"
            self.body += message.get("body", b"")
            more = message.get("more_body", False)

    def send(
        self, *parts: bytes, path: str = "/v1/chat/completions", whole: bool = True, head: Mapping[str, str] = JSON
    ) -> None:
        """A request in these parts; the client leaves behind the last one if that is not ``whole``."""
        messages: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        if whole:
            messages[-1]["more_body"] = False
        messages.append({"type": "http.disconnect"})
        coming = iter(messages)

        async def receive() -> Message:
            return next(coming)

        async def nothing(message: Message) -> None:
            raise AssertionError(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in head.items()],
        }
        asyncio.run(self._app(scope, receive, nothing))

    @property
    def named(self) -> str | None:
        """What the router is told."""
        return next((value.decode() for name, value in self.scope["headers"] if name == HEADER.encode()), None)


@pytest.mark.parametrize(("body", "named"), BODIES)
def test_the_conversation_of_a_body(body: dict[str, Any], named: str | None) -> None:
    proxy, raw = Proxy(), json.dumps(body).encode()
    proxy.send(raw[:7], raw[7:])
    assert (proxy.named, proxy.body) == (named, raw)


def test_a_body_is_left_alone_where_its_head_says_enough() -> None:
    for head in ({"x-session-id": "alice"}, {"thread-id": "t"}, {"content-type": "multipart/form-data"}):
        proxy = Proxy()
        proxy.send(b'{"prompt_cache_key": "k"}', head={**JSON, **head})
        assert proxy.named is None
    proxy = Proxy()
    proxy.send(b'{"prompt_cache_key": "k"}', path="/v1/sessions/alice/chat/completions")
    assert proxy.named is None


def test_what_is_no_json_not_complete_or_too_long_goes_on_as_it_came() -> None:
    for parts, whole in (((b"{",), True), ((b'{"prompt_cache_key": "k"}',), False), ((b"\xff",), True)):
        proxy = Proxy()
        proxy.send(*parts, whole=whole)
        assert (proxy.named, proxy.body, proxy.left) == (None, b"".join(parts), not whole)
    proxy = Proxy(most=8)
    proxy.send(b'{"prompt_', b'cache_key"', b': "k"}')
    assert (proxy.named, proxy.body) == (None, b'{"prompt_cache_key": "k"}')


def test_a_client_does_not_choose_by_our_own_header() -> None:
    proxy = Proxy()
    proxy.send(b"{}", head={**JSON, HEADER: "mine"})
    assert proxy.named is None
