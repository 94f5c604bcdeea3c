"""``EngineLink``: one engine process and the socket to it, from start to exit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from scheduler.protocol import EngineConfig, FromEngine, Shutdown, ToEngine

ENGINE_COMMAND = (sys.executable, "-P", "-m", "scheduler")

SEND_LIMIT = 4096  # messages that may wait for an engine that does not read
TERMINATE_GRACE = 2.0  # seconds between SIGTERM and SIGKILL
LAST_WORDS = 0.2  # seconds for what the process wrote before it ended

SECRETS = ("WARMTURN_API_KEY", "WARMTURN_DATABASE")  # of the server; the engine has no use for them

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FromEngine)


class LinkFull(Exception):
    """The engine has not read for so long that the socket's send queue is full."""


class EngineLink:
    """A running engine process, its socket, and its standard input. The engine exits when its standard input is
    closed.
    """

    def __init__(self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket) -> None:
        self._process = process
        self._socket = socket
        self._unsent: deque[bytes] = deque()  # kept for an engine that does not read: small ones only

    @classmethod
    async def start(
        cls, config: EngineConfig, command: Sequence[str], context: zmq.asyncio.Context, said: int = 2
    ) -> EngineLink:
        """Bind ``config.address``, then start the process, which imports its modules and waits for ``configure``. Its
        output goes to the file descriptor ``said``. Raises OSError or zmq.ZMQError.
        """
        socket = context.socket(zmq.PAIR)
        socket.set_hwm(SEND_LIMIT)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(config.address)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=said,  # whatever a library prints belongs to the log, not to our output
                stderr=said,
                env=engine_environment(config.device),
                start_new_session=True,  # Ctrl-C in the terminal is for the server, which then ends the engine
            )
        except BaseException:
            socket.close()
            raise
        return cls(process, socket)

    async def configure(self, config: EngineConfig) -> None:
        """Send the process its configuration: it begins to load the model."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # died already: messages() tells
            self._process.stdin.write(msgspec.json.encode(config) + b"\n")
            await self._process.stdin.drain()

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
        exited = asyncio.ensure_future(self._process.wait())
        try:
            while True:
                received = asyncio.ensure_future(self._socket.recv())
                await asyncio.wait((received, exited), return_when=asyncio.FIRST_COMPLETED)
                if not received.done():
                    await asyncio.wait((received,), timeout=LAST_WORDS)
                if not received.done():
                    received.cancel()
                    return
                yield _decoder.decode(received.result())
                self._flush()
        finally:
            exited.cancel()

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
                await self._process.wait()

    def kill(self) -> None:
        """Send SIGKILL to the process, without waiting for its end."""
        self._signal(signal.SIGKILL)

    async def close(self) -> None:
        """Free all resources; a process that is still alive is killed."""
        assert self._process.stdin is not None
        self.kill()
        self._process.stdin.close()
        self._socket.close()
        await self._process.wait()

    async def _ended(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), seconds)
        return not self.alive

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


def engine_environment(device: str) -> dict[str, str]:
    """The environment of the engine process: this one's without its secrets. In a source tree that is not installed,
    PYTHONPATH has the folder of ``scheduler`` (the command's -P keeps the working directory out of the imports). oneDNN
    and torch cache a kernel per matrix shape, and each step length is another shape: with the default limits of 1024
    the caches of a bfloat16 model on a CPU grow by 0.5 GB while it serves, so they are lowered. OpenMP threads spin for
    some ten microseconds instead of milliseconds: where cores are scarce, spinning took a third of them.
    """
    root = Path(__file__).resolve().parents[2]
    ours = {name: value for name, value in os.environ.items() if name not in SECRETS}
    spin = {} if "OMP_WAIT_POLICY" in ours else {"GOMP_SPINCOUNT": "3000"}
    environment = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128", **spin, **ours}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # transformers divides a model for the best device that it sees
    if root.name not in ("site-packages", "dist-packages"):
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{known}" if known else str(root)
    return environment
