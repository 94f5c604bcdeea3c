"""A proxy between a client and a server that keeps every request with what its answer says that the prompt cost."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

HOP = {"host", "content-length", "connection", "keep-alive", "transfer-encoding", "accept-encoding", "upgrade"}
PATIENCE = 20.0  # seconds until a proxy that does not start fails its test


@dataclass
class Exchange:
    """A request, and of its answer the status, the text and the times in seconds since the request came."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int = 0
    answer: str = ""
    first_token: float | None = None
    ended: bool = False
    started: float = field(default_factory=time.perf_counter)

    @property
    def receipt(self) -> dict[str, Any] | None:
        """The last ``cache`` of the answer, None where it has none."""
        found = None
        for text in _documents(self.answer):
            with suppress(ValueError):
                found = _find_receipt(json.loads(text)) or found
        return found


class Proxy:
    """Listens on a port of its own, in a thread; a context manager."""

    def __init__(self, target: str) -> None:
        self.exchanges: list[Exchange] = []
        self._client = httpx.AsyncClient(base_url=target, timeout=None)
        app = FastAPI()
        app.add_api_route("/{path:path}", self._pass, methods=["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
        config = uvicorn.Config(
            app, host="127.0.0.1", port=0, log_level="warning", lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        until = time.monotonic() + PATIENCE
        while not self._server.started:
            assert time.monotonic() < until, "the proxy does not start"
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE)

    @property
    def url(self) -> str:
        """Where clients find it."""
        (listener,) = self._server.servers
        return f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"

    async def _serve(self) -> None:
        """Serve until the end; what is still being passed on then is cut off."""
        await self._server.serve()
        await self._client.aclose()

    async def _pass(self, request: Request) -> Response:
        data = await request.body()
        try:
            body = json.loads(data) if data else None
        except ValueError:
            body = data.decode(errors="replace")
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        exchange = Exchange(request.method, path, dict(request.headers), body)
        self.exchanges.append(exchange)
        headers = {k: v for k, v in request.headers.items() if k not in HOP}
        passed = self._client.build_request(request.method, path, headers=headers, content=data)
        answer = await self._client.send(passed, stream=True)
        exchange.status = answer.status_code
        kept = {k: v for k, v in answer.headers.items() if k not in {*HOP, "content-encoding"}}
        return StreamingResponse(_keep(exchange, answer), status_code=answer.status_code, headers=kept)


async def _keep(exchange: Exchange, answer: httpx.Response) -> AsyncIterator[bytes]:
    """What the server sends, as it comes; closed with the client's connection, so that the server sees that it went."""
    parts: list[bytes] = []
    try:
        async for part in answer.aiter_bytes():
            if exchange.first_token is None and _has_token(part):
                exchange.first_token = time.perf_counter() - exchange.started
            parts.append(part)
            yield part
        exchange.ended = True
    finally:
        exchange.answer = b"".join(parts).decode(errors="replace")
        await answer.aclose()


def _has_token(part: bytes) -> bool:
    """Whether a part of a stream has a piece of the reply, in any of the three APIs."""
    return any(sign in part for sign in (b"_delta", b".delta", b'"content":"', b'"tool_calls"', b'"reasoning_content"'))


def _documents(answer: str) -> list[str]:
    """The JSON documents of an answer: the data of its events, or the whole."""
    events = [line.removeprefix("data:").strip() for line in answer.splitlines() if line.startswith("data:")]
    return events or [answer]


def _find_receipt(value: Any) -> dict[str, Any] | None:
    """The receipt within an answer: an object ``cache`` with ``reused``."""
    if isinstance(value, dict):
        cache = value.get("cache")
        if isinstance(cache, dict) and "reused" in cache:
            return cache
        return next((found for part in value.values() if (found := _find_receipt(part))), None)
    if isinstance(value, list):
        return next((found for part in value if (found := _find_receipt(part))), None)
    return None
