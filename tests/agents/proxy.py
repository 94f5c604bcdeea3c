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
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import Response, StreamingResponse
from starlette.websockets import WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
HOP = {"host", "content-length", "connection", "keep-alive", "transfer-encoding", "accept-encoding", "upgrade"}
PATIENCE = 20.0  # seconds until a proxy that does not start fails its test


@dataclass
class Exchange:
    """A request, and of its answer the status, the text and the times in seconds since the request came. ``socket``: it
    was a message of a WebSocket, with the headers of the connection; its answer is written as that of a stream.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int = 0
    answer: str = ""
    first_token: float | None = None
    ended: bool = False
    socket: bool = False
    started: float = field(default_factory=time.perf_counter)

    @property
    def response(self) -> dict[str, Any] | None:
        """The response at the end of a stream of Responses; None where there is none."""
        found = None
        for text in _documents(self.answer):
            with suppress(ValueError):
                event = json.loads(text)
                if isinstance(event, dict) and event.get("type") in ENDS:
                    found = event.get("response")
        return found

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
        app.add_api_websocket_route("/{path:path}", self._pass_socket)
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

    async def _pass_socket(self, below: WebSocket) -> None:
        """A connection of a client, and one to the server for it."""
        headers = {name: value for name, value in below.headers.items() if name not in HOP and "sec-w" not in name}
        url = str(self._client.base_url.copy_with(scheme="ws", path=below.url.path))
        try:
            above = await connect(url, additional_headers=headers, max_size=None)
        except InvalidStatus as refused:
            status = refused.response.status_code
            self.exchanges.append(Exchange("GET", below.url.path, dict(below.headers), None, status, socket=True))
            await below.close()
            return
        await below.accept()
        running: list[Exchange] = []
        back = asyncio.create_task(_pass_back(above, below, running))
        with suppress(WebSocketDisconnect, ConnectionClosed):
            while True:
                text = await below.receive_text()
                body = json.loads(text)
                if body.get("type") == "response.create":
                    running.append(Exchange("POST", below.url.path, dict(below.headers), body, socket=True))
                    self.exchanges.append(running[-1])
                await above.send(text)
        await above.close()
        await back


async def _pass_back(above: ClientConnection, below: WebSocket, running: list[Exchange]) -> None:
    """Pass on what the server sends, until one of the two leaves. The events are those of the first request that runs,
    as clients send them one after the other.
    """
    with suppress(ConnectionClosed, WebSocketDisconnect, RuntimeError):
        async for text in above:
            event = json.loads(text)
            if running:
                exchange = running[0]
                exchange.answer += f"data: {text!s}\n\n"
                exchange.status = exchange.status or 200
                if exchange.first_token is None and event["type"].endswith(".delta"):
                    exchange.first_token = time.perf_counter() - exchange.started
                if event["type"] in ENDS:
                    exchange.ended = True
                    exchange.status = {"error": event.get("status", 500), "response.failed": 500}.get(
                        event["type"], 200
                    )
                    del running[0]
            await below.send_text(str(text))
    with suppress(RuntimeError, WebSocketDisconnect):
        await below.close()


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
