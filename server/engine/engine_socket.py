"""``EngineSocket``: the server's end of the socket to one engine process, on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque

import zmq

SEND_LIMIT = 4096  # messages that may wait for an engine that does not read


class EngineSocket:
    """A zmq PAIR socket that neither ``send`` nor ``take`` waits for.

    Invariant: whatever zmq has received is in ``_came``, whenever the event loop waits. zmq's descriptor becomes
    readable only once for what comes, and any call may use that up, so each call is followed by a look.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        """Binds ``address``. Raises zmq.ZMQError."""
        self._socket = context.socket(zmq.PAIR)
        self._came: deque[bytes] = deque()
        self._news = asyncio.Event()
        try:
            self._socket.set_hwm(SEND_LIMIT)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(address)
        except zmq.ZMQError:
            self._socket.close()
            raise
        self._loop = asyncio.get_running_loop()
        self._descriptor = self._socket.fileno()
        self._loop.add_reader(self._descriptor, self._look)

    def send(self, data: bytes) -> bool:
        """Send without waiting, in order; False if the queue is full, and then nothing was sent."""
        try:
            self._socket.send(data, zmq.DONTWAIT)
        except zmq.Again:
            return False
        finally:
            self._look()
        return True

    def take(self) -> bytes | None:
        """The next message; None if there is none yet."""
        return self._came.popleft() if self._came else None

    async def wait(self) -> None:
        """Return when a message has come or ``wake`` was called, since the last time."""
        await self._news.wait()
        self._news.clear()

    def wake(self) -> None:
        """Let whoever waits look around."""
        self._news.set()

    def close(self) -> None:
        """Drop what was not sent or taken. Idempotent."""
        if not self._socket.closed:
            self._loop.remove_reader(self._descriptor)
            self._socket.close()

    def _look(self) -> None:
        while self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore[arg-type, operator]
            self._came.append(self._socket.recv(zmq.DONTWAIT))
            self._news.set()
