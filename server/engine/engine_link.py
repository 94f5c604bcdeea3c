"""``EngineLink``: one engine process and the socket to it, from start to exit."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections import deque
from collections.abc import AsyncGenerator

import msgspec
import zmq
import zmq.asyncio

from scheduler.engine_config import EngineConfig
from scheduler.protocol import FromEngine, Shutdown, ToEngine
from server.daemon_thread import in_daemon_thread
from server.engine.launcher import EngineLauncher

SEND_LIMIT = 4096  # messages that may wait for an engine that does not read
TERMINATE_GRACE = 2.0  # seconds between SIGTERM and SIGKILL
LAST_WORDS = 0.2  # seconds for what the process wrote before it ended

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FromEngine)


class LinkFull(Exception):
    """The engine has not read for so long that the socket's send queue is full."""


class EngineLink:
    """A running engine process, its socket, and its standard input. The engine exits when its standard input is
    closed.
    """

    def __init__(self, process: subprocess.Popen[bytes], socket: zmq.asyncio.Socket) -> None:
        self._process = process
        self._socket = socket
        self._exited = in_daemon_thread(process.wait, "engine process")
        self._unsent: deque[bytes] = deque()  # kept for an engine that does not read: small ones only

    @classmethod
    def start(
        cls, config: EngineConfig, launcher: EngineLauncher, context: zmq.asyncio.Context, output: int = 2
    ) -> EngineLink:
        """Bind ``config.address``, then take a process of ``launcher``; a new one prints to the file descriptor
        ``output``. Raises OSError or zmq.ZMQError.
        """
        socket = context.socket(zmq.PAIR)
        socket.set_hwm(SEND_LIMIT)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(config.address)
        try:
            process = launcher.launch(output)
        except BaseException:
            socket.close()
            raise
        return cls(process, socket)

    def configure(self, config: EngineConfig) -> None:
        """Send the process its configuration: it imports what it needs for it, and waits for ``load``."""
        self._write(msgspec.json.encode(config) + b"\n")

    def load(self) -> None:
        """Let the process read files, load the model, and serve."""
        self._write(b"\n")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def send(self, message: ToEngine) -> None:
        """Send without waiting, in order. Raises LinkFull if the send queue is full; then nothing was sent."""
        if not (self._flush() and self._try_send(_encoder.encode(message))):
            raise LinkFull

    def send_later(self, message: ToEngine) -> None:
        """Like ``send``, but a message that does not fit is kept and sent after the engine's next message."""
        self._unsent.append(_encoder.encode(message))
        self._flush()

    async def messages(self) -> AsyncGenerator[FromEngine]:
        """The engine's messages, until its process has ended and its last messages are read."""
        while True:
            received = asyncio.ensure_future(self._socket.recv())
            await asyncio.wait((received, self._exited), return_when=asyncio.FIRST_COMPLETED)
            if not received.done():
                await asyncio.wait((received,), timeout=LAST_WORDS)
            if not received.done():
                received.cancel()
                return
            yield _decoder.decode(received.result())
            self._flush()

    def death(self) -> str:
        """How the process ended, in a few words; call it only after ``close``."""
        code = self._process.returncode
        assert code is not None, "the process is alive"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    async def stop(self, flush: float, grace: float) -> None:
        """End the process: ask it to stop, which leaves it ``flush`` seconds to write KV to disk; send SIGTERM after
        ``grace`` more seconds, and SIGKILL ``TERMINATE_GRACE`` later.
        """
        self.send_later(Shutdown(flush))
        if not await self._ended(flush + grace):
            self._signal(signal.SIGTERM)
            if not await self._ended(TERMINATE_GRACE):
                self.kill()
                await asyncio.shield(self._exited)

    def kill(self) -> None:
        """Send SIGKILL to the process, without waiting for its end."""
        self._signal(signal.SIGKILL)

    async def close(self) -> None:
        """Free all resources; a process that is still alive is killed."""
        assert self._process.stdin is not None
        self.kill()
        with contextlib.suppress(ConnectionError):  # bytes that a dead process has not read
            self._process.stdin.close()
        self._socket.close()
        await asyncio.shield(self._exited)

    async def _ended(self, seconds: float) -> bool:
        await asyncio.wait((self._exited,), timeout=seconds)
        return not self.alive

    def _write(self, line: bytes) -> None:
        """Write to standard input, where a pipe has room for all that is ever written."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it died already: messages() ends
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _signal(self, number: signal.Signals) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _flush(self) -> bool:
        while self._unsent and self._try_send(self._unsent[0]):
            self._unsent.popleft()
        return not self._unsent

    def _try_send(self, data: bytes) -> bool:
        """One attempt; zmq.asyncio answers a non-blocking send with a future that is already done."""
        sent = self._socket.send(data, flags=zmq.DONTWAIT)
        assert isinstance(sent, asyncio.Future)
        return not isinstance(sent.exception(), zmq.Again)
