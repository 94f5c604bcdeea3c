"""What a request leaves is gone when its last reader is: collections, which everybody waits for, are seldom needed."""

import asyncio
import gc
import json
import socket
from collections import Counter
from typing import Any

import pytest
import uvloop
from http_context import HELLO, until
from real_port import Port, port, request

REQUESTS = 20


def post(path: str, **body: Any) -> bytes:
    return request(path, json.dumps(body).encode(), "POST", "Connection: close")


KINDS = {
    "whole": post("/v1/chat/completions", messages=HELLO),
    "streamed": post("/v1/chat/completions", messages=HELLO, stream=True),
    "named": post("/v1/sessions/s1/chat/completions", messages=HELLO),
    "named streamed": post("/v1/sessions/s2/chat/completions", messages=HELLO, stream=True),
    "completion": post("/v1/completions", prompt="Once"),
    "response": post("/v1/responses", input="Hello"),
    "response streamed": post("/v1/responses", input="Hello", stream=True),
    "message": post("/v1/messages", messages=HELLO, max_tokens=5),
    "bad": post("/v1/chat/completions", messages=5),
    "no json": request("/v1/chat/completions", b"{", "POST", "Connection: close"),
    "health": request("/health", b"", "GET", "Connection: close"),
    "models": request("/v1/models", b"", "GET", "Connection: close"),
    "nowhere": request("/v2", b"", "GET", "Connection: close"),
    "not http": b"\x00\r\n\r\n",
}


async def asked(made: Port, data: bytes) -> None:
    """``REQUESTS`` times, one after the other, by a client that leaves nothing itself."""
    loop = asyncio.get_running_loop()
    for _ in range(REQUESTS):
        with socket.socket() as client:
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", made.number))
            await loop.sock_sendall(client, data)
            while await loop.sock_recv(client, 65_536):
                pass
    await until(lambda: not made.connections)
    await asyncio.sleep(0.05)


async def left(data: bytes) -> Counter[str]:
    """What a collection finds after so many requests more, by type.

    What was there before them is frozen, and stays so: tests that ran before in this process may let go of theirs now.
    """
    async with port() as made:
        await asked(made, data)
        gc.disable()
        gc.freeze()
        try:
            await asked(made, data)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            return Counter(type(one).__qualname__ for one in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_for_a_collection(kind: str) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # asyncio's own transports are in cycles
        found = runner.run(left(KINDS[kind]))
    assert found.total() < REQUESTS, found
