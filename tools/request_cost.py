"""Measures what a chat costs the server process without the model: CPU time, and memory while it waits.

    python -m tools.request_cost [--requests 2000] [--waiting 200] [--stream]

The app runs in this process behind a real port, with the demo model's tokenizer and an engine that answers at once, or
never. A child process is the client. CPU is that of this process, the best of three runs; what a waiting chat costs is
counted beyond its connection, which is open and idle before.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import resource
import socket
import sys
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import uvloop

import server
from scheduler.engine_stats import Stats
from scheduler.model_facts import ModelFacts
from scheduler.protocol import Delta, FinishReason, Submit
from scheduler.turn_receipt import Receipt
from server.api.sessions.transfers import Transfers
from server.app import create_app
from server.chat.chat_tokenizer import ChatTokenizer
from server.engine.engine import LoadableEngine, State, TurnRefused
from server.engine.mailbox import Mailbox
from server.http.connection import HttpConfig
from server.instance import seldom_collected
from server.log.session_log import SessionLog
from server.models.offered_model import OfferedModel
from server.models.registry import ModelRegistry
from server.models.room import ModelRoom
from server.serve import HttpServer, listening
from server.torchless import without_torch
from server.turns.context import ServerContext

RUNS = 3
WARM = 300  # requests before any is counted
SHOWN = 20  # kinds of objects
MESSAGES = [
    {"role": "system", "content": "You are helpful."},
    {"role": "user", "content": "Hello there, how are you?"},
]
FACTS = ModelFacts(
    architecture="None",
    parameters=1,
    weight_bytes=4,
    dtype="float32",
    device="cpu",
    vocab_size=1024,
    max_context=2048,
    eos_token_ids=(2,),
    mode="packed",
    probe="none",
    layer_kinds={"full": 1},
    kv_bytes_per_token=64,
    page_size=16,
    pages=128,
    fingerprint="f" * 32,
)
CLIENT = """
import socket, sys
port, count, data = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])
with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rb") as answers:
    for _ in range(count):
        connection.sendall(data)
        assert b" 200 " in answers.readline()
        length = None
        while (line := answers.readline()) != b"\\r\\n":
            name, _, value = line.partition(b":")
            length = int(value) if name == b"content-length" else length
        if length is not None:
            answers.read(length)
        while length is None:
            size = int(answers.readline(), 16)
            answers.read(size + 2)
            if size == 0:
                break
"""


class Immediate:
    """As much of an engine as a chat needs. ``answers``: whether turns end at once; else they wait in ``waiting``."""

    facts = FACTS
    stats = Stats()
    healthy = True

    def __init__(self) -> None:
        self.answers = True
        self.waiting: list[Mailbox] = []

    def state(self) -> State:
        return "ready"

    def submit(self, request: Submit) -> Mailbox:
        turn = Mailbox(request.turn, lambda name: None, (request.tenant, request.session))
        if self.answers:
            asyncio.get_running_loop().call_soon(self._answer, turn)
        else:
            self.waiting.append(turn)
        return turn

    def turns_away(self, tenant: str) -> TurnRefused | None:
        return None

    def reading(self, tenant: str) -> AbstractContextManager[None]:
        return nullcontext()

    def _answer(self, turn: Mailbox) -> None:
        turn.push(Delta(turn.name, receipt=Receipt(10, 0)))
        turn.push(Delta(turn.name, (5,), "Hi"))
        turn.push(Delta(turn.name, (2,), "", FinishReason.STOP))


@asynccontextmanager
async def serving(engine: Immediate) -> AsyncIterator[tuple[int, HttpServer]]:
    """The port of the app over an engine, and what serves it."""
    with tempfile.TemporaryDirectory() as folder, listening("127.0.0.1", 0) as listener:
        log = SessionLog(Path(folder) / "log.sqlite")
        tokens = ChatTokenizer.load(str(Path(server.__file__).parent / "demo"))
        transfers = Transfers(Path(folder) / "transfer", 1 << 20)
        made = cast(LoadableEngine, engine)
        model = OfferedModel.of_engine(made, ServerContext(made, log, tokens, "demo"))
        app = create_app(ModelRegistry([model], ModelRoom(1)), log, api_keys={}, transfers=transfers)
        http = HttpServer(HttpConfig(app, patience=600.0, most=10_000, goodbye=1))
        task = asyncio.create_task(http.serve(sockets=[listener]))
        try:
            while not http.started:
                await asyncio.sleep(0.01)
            seldom_collected()  # as a server does
            yield listener.getsockname()[1], http
        finally:
            http.should_exit = True
            await task
            await log.close()


def request(stream: bool) -> bytes:
    body = json.dumps({"messages": MESSAGES, "temperature": 0.7, "max_tokens": 64, "stream": stream}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def ask(port: int, count: int, data: bytes) -> float:
    """Have so many chats answered, one after the other; the CPU milliseconds of this process for each."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, str(port), str(count), data.hex())
    if await client.wait():
        raise SystemExit("the client failed")
    after = resource.getrusage(resource.RUSAGE_SELF)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / count


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something, and for what follows from it."""
    while not condition():
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)


async def measure_waiting(port: int, http: HttpServer, engine: Immediate, count: int, data: bytes) -> None:
    """Print what ``count`` chats cost that have no answer yet."""
    loop = asyncio.get_running_loop()
    clients: list[socket.socket] = []

    async def connect(number: int) -> None:
        for _ in range(number):
            client = socket.socket()
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", port))
            clients.append(client)
        await until(lambda: len(http.server_state.connections) >= len(clients))

    async def send(those: list[socket.socket]) -> None:
        for client in those:
            await loop.sock_sendall(client, data)
        await until(lambda: len(engine.waiting) >= len(clients))

    await connect(20)
    await send(clients[:])  # what the first ones leave behind is not counted
    tracemalloc.start()
    await connect(count)
    size, objects = measure_held()
    await send(clients[20:])
    size_then, objects_then = measure_held()
    more = objects_then - objects
    print(f"waiting: {more.total() / count:.0f} objects, {(size_then - size) / count / 1000:.1f} KB each")
    print(", ".join(f"{number / count:.0f} {kind}" for kind, number in more.most_common(SHOWN)))
    for client in clients:
        client.close()
    await until(lambda: not http.server_state.connections)


def measure_held() -> tuple[int, Counter[str]]:
    """Bytes and, by kind, objects that the collector of garbage looks at."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0], Counter(type(thing).__qualname__ for thing in gc.get_objects())


async def measure(requests: int, count: int, stream: bool) -> None:
    engine = Immediate()
    async with serving(engine) as (port, http):
        await ask(port, WARM, request(stream))
        times = [await ask(port, requests, request(stream)) for _ in range(RUNS)]
        print(f"accepted: {min(times):.2f} ms of CPU each ({', '.join(f'{time:.2f}' for time in times)})")
        engine.answers = False
        await measure_waiting(port, http, engine, count, request(stream))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--waiting", type=int, default=200)
    parser.add_argument("--stream", action="store_true")
    asked: Any = parser.parse_args(arguments)
    without_torch()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(asked.requests, asked.waiting, asked.stream))


if __name__ == "__main__":
    main()
