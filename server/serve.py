"""`warmturn serve`: everything put together, from the bound port to the exit status."""

from __future__ import annotations

import asyncio
import errno
import gc
import ipaddress
import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from scheduler.messages import ModelFacts
from server import data_dir
from server.config import ServeConfig, UsageError
from server.connection import HttpConfig
from server.engine import EngineFailed
from server.engine_link import ENGINE_COMMAND
from server.engine_process import EngineProcess
from server.entrance import Entrance
from server.housekeeping import Housekeeper
from server.log import LogUnavailable, SessionLog

if TYPE_CHECKING:
    from server.tokens import Tokens

T = TypeVar("T")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
FLUSH_SECONDS = 30.0  # at most, for KV that is not on disk yet when the turns are over
HTTP_SECONDS = 5  # for the last bytes of their answers, and once more for their readers to take them
CUT_OFF_SECONDS = 1.0  # for requests that are no turns, once everything else is over
UNSENT_BYTES = 64 * 1024  # of an answer in the kernel
MOST_CONNECTIONS = 65_536
FILES = 512  # open files that are kept for everything but connections
LOOK_SECONDS = 0.05  # between two looks at whether something is over


def serve(config: ServeConfig, command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Serve until told to stop; the exit status: 0, or 2 when the model cannot be served. Raises UsageError.

    ``command`` starts an engine process.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    # Without a network both processes retry for a while, and would each tell so twice a try; the end says it once.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    with listening(config.host, config.port) as listener, data_dir.locked(config.data_dir) as folder:
        try:
            name = data_dir.identity(folder)
            where = config.database or folder / "log.sqlite"
            log = SessionLog(where, config.durability, name, lambda: data_dir.empty_cache(folder))
        except LogUnavailable as error:
            raise UsageError(error.message) from None
        if not config.api_key and not is_loopback(listener):
            say("warning: no --api-key is set: everyone who reaches this port is served")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            status = runner.run(Service(config, command, listener, log).run())
        for number in SIGNALS:  # the loop's handlers ended with it
            signal.signal(number, lambda *_: os._exit(1))
        return status


class Service:
    """A running server: the HTTP side, the engine, and the order in which they come and go."""

    def __init__(self, config: ServeConfig, command: Sequence[str], listener: socket.socket, log: SessionLog) -> None:
        self._config = config
        self._listener = listener
        self._log = log
        self._entrance = Entrance()
        self._engine = EngineProcess(
            config.engine_config(),
            command=command,
            on_loading=say,
            on_ready=lambda facts: self._housekeeper.ready(),
            on_forgotten=lambda tenant, session: self._housekeeper.forgotten(tenant, session),
        )
        self._housekeeper = Housekeeper(self._engine, log)
        most = most_connections()
        self._http = HttpServer(
            HttpConfig(self._entrance, patience=config.client_seconds, most=most, goodbye=HTTP_SECONDS)
        )
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Serve; the exit status."""
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._told_to_stop)
        await self._engine.start()
        http = asyncio.create_task(self._http.serve(sockets=[self._listener]))
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._log.close)
            stack.push_async_callback(self._housekeeper.close)
            sweeping = asyncio.create_task(self._housekeeper.run())
            loading = asyncio.create_task(self._load(stack))
            stopped = asyncio.create_task(self._stop.wait())
            try:
                await asyncio.wait((loading, stopped, http), return_when=asyncio.FIRST_COMPLETED)
                if loading.done():
                    loading.result()
                    await asyncio.wait((stopped, http), return_when=asyncio.FIRST_COMPLETED)
            except (EngineFailed, UsageError) as error:
                say(str(error))
                return 2
            finally:
                for task in (loading, stopped, sweeping):
                    task.cancel()
                await asyncio.wait((loading, stopped, sweeping))
                await self._leave(http)  # before the stack: turns that still run need what it closes
        return 0

    async def _load(self, stack: AsyncExitStack) -> None:
        """Wait for engine and tokenizer, then let the app in. Raises EngineFailed or UsageError."""
        tokenizer = in_daemon_thread(lambda: _load_tokens(self._config))
        facts = await self._engine.wait_ready()
        try:
            tokens = await tokenizer
        except Exception as error:
            raise UsageError(f"the tokenizer cannot be loaded: {first_line(error)}") from error
        from server.app import create_app
        from server.template import stability
        from server.transfers import Transfers

        config = self._config
        template = await in_daemon_thread(lambda: stability(tokens))
        app = create_app(
            self._engine,
            self._log,
            tokens,
            served_name=config.name,
            api_keys=config.api_key,
            transfers=Transfers(config.data_dir / "transfer", int(config.max_capsule)),
            template=template,
            allowed_hosts=config.allowed_host,
        )
        stack.callback(tokens.close)
        await stack.enter_async_context(app.router.lifespan_context(app))
        gc.freeze()  # or collections would walk all of transformers again and again, and every stream wait for them
        self._entrance.open(app)
        if config.max_context is not None and facts.max_context < config.max_context:
            say(f"--max-context: the model and the KV memory allow {facts.max_context}, not {config.max_context}")
        print(f"warmturn: serving {config.name} at {url(self._listener)} ({summary(facts)})", flush=True)

    def _told_to_stop(self) -> None:
        """The first signal ends the server in order, the second one at once; committed turns are safe either way."""
        if self._stop.is_set():
            self._engine.kill()
            os._exit(1)
        say("stopping; once more to leave at once")
        self._stop.set()

    async def _leave(self, http: asyncio.Task[None]) -> None:
        """End in order, in bounded time. No new turns while the port still answers; the running ones go on for
        ``--drain-seconds``, until their answers are written; then the engine writes KV to disk and goes; then the port.
        """
        drain = self._config.drain_seconds
        self._engine.drain()
        await within(drain, lambda: self._engine.in_hand == 0)
        await self._engine.stop(flush=min(drain, FLUSH_SECONDS))
        await within(HTTP_SECONDS, lambda: self._engine.in_hand == 0)  # turns that were ended are told so
        self._http.should_exit = True
        await http


async def within(seconds: float, over: Callable[[], bool]) -> None:
    """Wait until something is over, for so many seconds at most."""
    until = time.monotonic() + seconds
    while not over() and time.monotonic() < until:
        await asyncio.sleep(LOOK_SECONDS)


class HttpServer(uvicorn.Server):
    """Uvicorn without its signal handlers: ours stop the engine too, and the exit status is ours."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port. Complete answers have the graceful timeout to reach their readers; requests that have none
        after ``CUT_OFF_SECONDS`` are no turns, and do not hold the exit."""
        asyncio.get_running_loop().call_later(CUT_OFF_SECONDS, self._cut_off)
        await super().shutdown(sockets)

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            assert isinstance(connection, HttpToolsProtocol)
            if connection.cycle is not None and not connection.cycle.response_complete:
                connection.transport.abort()


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens already, so that a port in use is noticed before a model is loaded. Raises UsageError."""
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
    """How many connections may be open at once: what the limit of open files, raised as far as it goes, leaves."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(FILES, min(MOST_CONNECTIONS, soft - FILES))


def url(listener: socket.socket) -> str:
    """Where the server answers."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine reaches the socket."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def summary(facts: ModelFacts) -> str:
    """The model in a few words."""
    pages = f"{facts.pages} pages of {facts.page_size} tokens"
    return f"{facts.dtype} on {facts.device}, mode {facts.mode}, {pages}, context {facts.max_context}"


def say(text: str) -> None:
    """A line for the person at the terminal."""
    print(f"warmturn: {text}", file=sys.stderr, flush=True)


def first_line(error: Exception) -> str:
    """What an exception says, in one line."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _load_tokens(config: ServeConfig) -> Tokens:
    from server.tokens import Tokens  # imports transformers, and while it does the port is answered already

    file = config.response_template
    tokens = Tokens.load(config.source, None if file is None else json.loads(file.expanduser().read_text()))
    _ = tokens.dialect  # measured here, not by the first request
    return tokens


def in_daemon_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run ``work`` on a thread that does not keep the process from leaving, as one of a pool would."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(outcome: T | Exception) -> None:
        if result.done():
            return
        if isinstance(outcome, Exception):
            result.set_exception(outcome)
            result.exception()  # whoever waits hears it; nobody has to
        else:
            result.set_result(outcome)

    def run() -> None:
        outcome: T | Exception
        try:
            outcome = work()
        except Exception as error:
            outcome = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name="tokenizer", daemon=True).start()
    return result
