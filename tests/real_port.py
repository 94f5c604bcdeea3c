"""The app of ``http_context`` behind a real port in the test's own process, and clients that speak bytes."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from http_context import HOST, P, Scenario, Site, Test, site, within
from starlette.types import ASGIApp

from server.http.connection import HttpConfig
from server.serve import HttpServer, listening

MOST = 64  # connections


@dataclass
class Port:
    site: Site
    number: int
    server: HttpServer
    clients: list[Client] = field(default_factory=list)

    @property
    def connections(self) -> int:
        """How many are open, as the server sees it."""
        return len(self.server.server_state.connections)

    async def open(self, receive_buffer: int | None = None) -> Client:
        """A new connection. ``receive_buffer``: bytes that the client's kernel takes unread, about."""
        plain = socket.socket()
        if receive_buffer is not None:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        plain.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", self.number))
        limit = 65_536 if receive_buffer is None else receive_buffer // 2
        self.clients.append(Client(*await asyncio.open_connection(sock=plain, limit=limit)))
        return self.clients[-1]

    async def leave(self) -> None:
        for client in self.clients:
            client.leave()
            with suppress(OSError):
                await client.writer.wait_closed()


@dataclass
class Client:
    """One connection's two directions."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of one answer with a length."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None, head
        return int(head[9:12]), await self.reader.readexactly(int(length[1]))

    async def closed(self) -> bytes:
        """Wait for the server to close; what came before that."""
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""

    def leave(self) -> None:
        self.writer.close()


@asynccontextmanager
async def port(patience: float = 60.0, app: ASGIApp | None = None, **parts: Any) -> AsyncIterator[Port]:
    """A Port with ``patience`` for its clients, closed at the end. ``app``: another one than the site's; ``parts`` are
    for that one.
    """
    async with site(**parts) as made:
        with listening("127.0.0.1", 0) as listener:
            server = HttpServer(HttpConfig(app or made.app, patience=patience, most=MOST, goodbye=1))
            task = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(0.01)
            opened = Port(made, listener.getsockname()[1], server)
            try:
                yield opened
            finally:
                await opened.leave()
                server.should_exit = True
                await task


def request(path: str, body: bytes = b"", method: str = "POST", *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {HOST}", *headers]
    if body or method == "POST":
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def on_a_port(**parts: Any) -> Callable[[Scenario[Port, P]], Test[P]]:
    """Make a test of a coroutine function whose first parameter is a Port; ``parts`` are for its site, or functions
    that make them.
    """
    return within(lambda: port(**{name: part() if callable(part) else part for name, part in parts.items()}))
