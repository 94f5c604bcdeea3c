"""`warmturn serve`: opens the port, runs an ``Instance`` behind uvicorn, and stops it at a signal."""

from __future__ import annotations

import asyncio
import errno
import gc
import ipaddress
import logging
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path

import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import Server

from server.config.model_list import model_list
from server.config.serve_options import ServeConfig
from server.config.usage_error import UsageError
from server.engine.engine import EngineFailed
from server.engine.launcher import EngineLauncher
from server.http.connection import HttpConfig
from server.hub import look_for
from server.instance import HTTP_SECONDS, Instance, quiet, summary
from server.log import data_dir
from server.telemetry import log_context
from server.telemetry.log_context import say
from server.torchless import without_torch

SIGNALS = (signal.SIGTERM, signal.SIGINT)
CUT_OFF_SECONDS = 1.0  # for requests that are no turns, once everything else is over
UNSENT_BYTES = 64 * 1024  # of an answer in the kernel
MOST_CONNECTIONS = 65_536
FILES = 512  # open files that are kept for everything but connections


def serve(config: ServeConfig, launcher: EngineLauncher) -> int:
    """Serve until a signal. Returns the exit status: 0, or 2 if the model cannot be served. Raises UsageError.

    ``launcher`` starts the engine.
    """
    log_context.configure(config.log_format, config.log_level)
    quiet()
    without_torch()
    gc.disable()  # until ``seldom_collected``: what is imported stays
    with listening(config.host, config.port) as listener, data_dir.locked(config.data_dir) as folder:
        for entry in model_list(config):
            look_for(entry.config.source)
        if not config.has_keys and not is_loopback(listener):
            say("warning: no --api-key is set: everyone who reaches this port is served", logging.WARNING)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            status = runner.run(Service(config, launcher, listener, folder).run())
        for number in SIGNALS:  # the loop's handlers ended with it
            signal.signal(number, lambda *_: os._exit(1))
        return status


class Service:
    """A running server: an ``Instance`` and uvicorn, and the order in which they start and stop."""

    def __init__(self, config: ServeConfig, launcher: EngineLauncher, listener: socket.socket, folder: Path) -> None:
        self._config = config
        self._listener = listener
        self._instance = Instance(config, launcher, folder)
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal. Returns the exit status."""
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        async with AsyncExitStack() as stack:
            await self._instance.start(stack)
            server = self._http_server()
            http = asyncio.create_task(server.serve(sockets=[self._listener]))
            loading = asyncio.create_task(self._load(stack))
            stopped = asyncio.create_task(self._stop.wait())
            try:
                await asyncio.wait((loading, stopped, http), return_when=asyncio.FIRST_COMPLETED)
                if loading.done():
                    loading.result()
                    await asyncio.wait((stopped, http), return_when=asyncio.FIRST_COMPLETED)
            except (EngineFailed, UsageError) as error:
                say(str(error), logging.ERROR)
                return 2
            finally:
                for task in (loading, stopped):
                    task.cancel()
                await asyncio.wait((loading, stopped))
                await self._leave(server, http)  # before the stack: turns that still run need what it closes
        return 0

    async def _load(self, stack: AsyncExitStack) -> None:
        """Let the app in, and say so. Raises EngineFailed or UsageError."""
        facts = await self._instance.wait_until_loaded(stack)
        say(f"serving {self._instance.models.first.name} at {url(self._listener)} ({summary(facts)})", result=True)

    def _on_signal(self) -> None:
        """The first signal ends the server in order, the second one at once; committed turns are safe either way."""
        if self._stop.is_set():
            self._instance.kill()
            os._exit(1)
        say("stopping; a second signal stops at once")
        self._stop.set()

    def _http_server(self) -> HttpServer:
        patience, most = self._config.client_seconds, most_connections()
        return HttpServer(HttpConfig(self._instance.entrance, patience=patience, most=most, goodbye=HTTP_SECONDS))

    async def _leave(self, server: HttpServer, http: asyncio.Task[None]) -> None:
        """End in order, in bounded time: first the turns, while the port still answers, then the port."""
        await self._instance.drain()
        server.should_exit = True
        await http


class HttpServer(Server):
    """Uvicorn without its signal handlers: ours also stop the engine and set the exit status."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port. Complete answers may take the graceful timeout to reach their clients; requests without an
        answer after ``CUT_OFF_SECONDS`` are cut off (turns have ended before).
        """
        asyncio.get_running_loop().call_later(CUT_OFF_SECONDS, self._cut_off)
        await super().shutdown(sockets)

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            if not isinstance(connection, HttpToolsProtocol):
                continue  # a WebSocket: uvicorn has closed it
            if connection.cycle is not None and not connection.cycle.response_complete:
                connection.transport.abort()


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket, opened before the model is loaded so that a port in use is noticed early. Raises
    UsageError.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        raise UsageError(f"--host: {host} is not an address of this machine") from None
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # connections inherit it: what is not read waits here, counted
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        try:
            listener.bind(address)
            listener.listen(2048)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UsageError(f"--port: {port} is in use on {host}; another one: --port {port + 1}") from None
            raise UsageError(f"--host, --port: cannot listen on {host}, port {port}: {error.strerror}") from None
        yield listener


def most_connections() -> int:
    """The most connections that may be open at once, from the limit of open files, which is raised to its hard
    limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(FILES, min(MOST_CONNECTIONS, soft - FILES))


def url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine reaches the socket."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback
