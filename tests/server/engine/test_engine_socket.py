"""The server's end of the socket to an engine: nothing that came is overlooked, and nothing waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop
import zmq

from server.engine.engine_socket import SEND_LIMIT, EngineSocket

ARRIVAL = 0.05  # seconds in which a message has come over
PATIENCE = 60.0  # seconds until a test that hangs fails


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context


def engine_at(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    engine = context.socket(zmq.PAIR)
    engine.set_hwm(0)
    engine.setsockopt(zmq.LINGER, 0)
    engine.connect(address)
    return engine


async def taken(socket: EngineSocket, count: int) -> list[bytes]:
    """The next messages."""
    came: list[bytes] = []
    async with asyncio.timeout(PATIENCE):
        while len(came) < count:
            if (data := socket.take()) is None:
                await socket.wait()
            else:
                came.append(data)
    return came


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_what_came_while_something_was_sent_is_found(
    loop: Callable[[], asyncio.AbstractEventLoop], context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    """Sending uses up zmq's sign that something came."""

    async def run() -> None:
        address = f"ipc://{tmp_path}/engine"
        socket = EngineSocket(context, address)
        with engine_at(context, address) as engine:
            engine.send(b"hello")
            assert await taken(socket, 1) == [b"hello"]
            for number in range(3):
                engine.send(b"%d" % number)
            time.sleep(ARRIVAL)  # the event loop has no chance to look
            assert socket.send(b"to the engine")
            assert await taken(socket, 3) == [b"0", b"1", b"2"]
            assert engine.recv() == b"to the engine"
        socket.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


async def test_a_full_queue_refuses_and_loses_nothing(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/engine"
    socket = EngineSocket(context, address)
    assert not socket.send(b"nobody is there")
    with engine_at(context, address) as engine:
        engine.send(b"hello")
        await taken(socket, 1)
        data, sent = bytes(4096), 0
        while socket.send(data):
            sent += 1
        assert sent >= SEND_LIMIT
        assert [len(engine.recv()) for _ in range(sent)] == [len(data)] * sent
        assert not engine.poll(0)
    socket.close()
    socket.close()


async def test_whoever_waits_can_be_woken(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    socket = EngineSocket(context, f"ipc://{tmp_path}/engine")
    asyncio.get_running_loop().call_soon(socket.wake)
    async with asyncio.timeout(PATIENCE):
        await socket.wait()
    assert socket.take() is None
    socket.close()
