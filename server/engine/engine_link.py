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

from scheduler.engine_config import EngineConfig
from scheduler.protocol import FromEngine, Shutdown, ToEngine
from server.daemon_thread import in_daemon_thread
from server.engine.engine_socket import EngineSocket
from server.engine.launcher import EngineLauncher

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

    def __init__(self, process: subprocess.Popen[bytes], socket: EngineSocket) -> None:
        self._process = process
        self._socket = socket
        self._exited = in_daemon_thread(process.wait, "engine process")
        self._unsent: deque[bytes] = deque()  # kept for an engine that does not read: small ones only

    @classmethod
    def start(
        cls, config: EngineConfig, launcher: EngineLauncher, context: zmq.Context[zmq.Socket[bytes]], output: int = 2
    ) -> EngineLink:
        """Bind ``config.address``, then take a process of ``launcher``; a new one prints to the file descriptor
        ``output``. Raises OSError or zmq.ZMQError.
        """
        socket = EngineSocket(context, config.address)
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
        if not (self._flush() and self._socket.send(_encoder.encode(message))):
            raise LinkFull

    def send_later(self, message: ToEngine) -> None:
        """Like ``send``, but a message that does not fit is kept and sent after the engine's next message."""
        self._unsent.append(_encoder.encode(message))
        self._flush()

    async def messages(self) -> AsyncGenerator[FromEngine]:
        """The engine's messages, until its process has ended and its last messages are read."""
        self._exited.add_done_callback(lambda _: self._socket.wake())
        while True:
            while (data := self._socket.take()) is not None:
                yield _decoder.decode(data)
                self._flush()
            try:
                async with asyncio.timeout(LAST_WORDS if self._exited.done() else None):
                    await self._socket.wait()
            except TimeoutError:
                return

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
        if not await self._has_ended(flush + grace):
            self._signal(signal.SIGTERM)
            if not await self._has_ended(TERMINATE_GRACE):
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

    async def _has_ended(self, seconds: float) -> bool:
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
        while self._unsent and self._socket.send(self._unsent[0]):
            self._unsent.popleft()
        return not self._unsent
