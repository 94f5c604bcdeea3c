"""Benchmark of responses over a WebSocket beside HTTP: bytes and milliseconds of a turn after a long history.

    python -m tools.bench_socket [--history 60000] [--turns 10]

A server with a small random model, so that little but the way of the words counts. CPU time is that of both processes
of the server. What is given is the median of the turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from websockets.asyncio.client import connect

from server.cli.bench.bench_load import WORDS
from tools.random_model import DEMO, TOKENS
from tools.running import Server, serving
from tools.tables import table

WORD = 2.9  # tokens, in the demo model's tokenizer
NEW = 200  # tokens of a turn's input, about: what a tool gives back
REPLY = 16  # tokens
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
Respond = Callable[[str], Awaitable["Turn"]]


@dataclass
class Turn:
    """One turn: bytes of messages, without their heads; milliseconds to the first event of text and to the last."""

    sent: int
    received: int
    first: float
    whole: float
    response: Any = None
    cpu: float = 0.0


@dataclass
class Way:
    """How requests reach the server. ``respond`` runs a turn with new words."""

    name: str
    respond: Respond
    turns: list[Turn] = field(default_factory=list)


def make_model(folder: Path) -> Path:
    """A llama of two small layers, with the demo model's tokenizer and template."""
    config = LlamaConfig(
        vocab_size=TOKENS,
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((DEMO / name).read_bytes())
    return folder


def words(rng: random.Random, tokens: int) -> str:
    """Text of about so many tokens."""
    return " ".join(rng.choice(WORDS) for _ in range(int(tokens / WORD)))


async def read_events(events: AsyncIterator[bytes], sent: int, began: float) -> Turn:
    """Read one response to its end."""
    received, first = 0, None
    async for data in events:
        received += len(data)
        if not data.startswith(b"{"):
            continue
        event = json.loads(data)
        if first is None and event["type"].endswith(".delta"):
            first = time.perf_counter()
        if event["type"] in ENDS:
            if event["type"] not in ENDS[:2]:
                raise SystemExit(data.decode()[:500])
            now = time.perf_counter()
            return Turn(sent, received, 1000 * ((first or now) - began), 1000 * (now - began), event["response"])
    raise SystemExit("the response has no end")


async def over_http(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Turn:
    """One response over HTTP."""
    data, began = json.dumps({**body, "stream": True}).encode(), time.perf_counter()
    head = {"content-type": "application/json"}
    async with client.stream("POST", f"{url}/v1/responses", content=data, headers=head) as answer:

        async def events() -> AsyncIterator[bytes]:
            async for line in answer.aiter_lines():
                yield line.removeprefix("data: ").encode()

        return await read_events(events(), len(data), began)


def whole_history(server: Server, common: dict[str, Any]) -> Respond:
    """All of it with each request, nothing stored: what agents send over HTTP."""
    items: list[Any] = []

    async def respond(text: str) -> Turn:
        items.append({"role": "user", "content": text})
        turn = await over_http(server.client, server.url, {**common, "input": items, "store": False})
        items.extend(turn.response["output"])
        return turn

    return respond


def respond_stored(server: Server, common: dict[str, Any]) -> Respond:
    """Only new items, after a stored response."""
    previous: list[str] = []

    async def respond(text: str) -> Turn:
        after = {"previous_response_id": previous[-1]} if previous else {}
        turn = await over_http(server.client, server.url, {**common, **after, "input": text})
        previous.append(turn.response["id"])
        return turn

    return respond


@asynccontextmanager
async def socket(server: Server, common: dict[str, Any]) -> AsyncIterator[Respond]:
    """Only new items, over one connection, nothing stored."""
    previous: list[str] = []
    async with connect(server.url.replace("http", "ws", 1) + "/v1/responses", max_size=None) as connection:

        async def respond(text: str) -> Turn:
            after = {"previous_response_id": previous[-1]} if previous else {}
            event = {"type": "response.create", **common, **after, "input": text, "store": False}
            data, began = json.dumps(event), time.perf_counter()
            await connection.send(data)

            async def events() -> AsyncIterator[bytes]:
                while True:
                    yield await connection.recv(decode=False)

            turn = await read_events(events(), len(data), began)
            previous.append(turn.response["id"])
            return turn

        yield respond


async def measure(server: Server, history: int, turns: int) -> list[Way]:
    """Run the ways by turns, each with a conversation of its own."""
    common = {"max_output_tokens": REPLY, "temperature": 0, "instructions": "Answer.", "ignore_eos": True}
    async with server.client, socket(server, common) as over_socket:
        ways = [
            Way("HTTP, whole history", whole_history(server, common)),
            Way("HTTP, previous_response_id, stored", respond_stored(server, common)),
            Way("WebSocket, not stored", over_socket),
        ]
        for number, way in enumerate(ways):
            await way.respond(words(random.Random(number), history))
        for turn in range(turns):
            text = words(random.Random(100 + turn), NEW)
            for way in ways:
                before = server.cpu()
                way.turns.append(await way.respond(text))
                way.turns[-1].cpu = 1000 * (server.cpu() - before)
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--history", type=int, default=60_000, help="tokens before the first turn that counts")
    parser.add_argument("--turns", type=int, default=10)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        with serving(str(make_model(model)), Path(folder) / "data", "--kv-memory", "2G") as server:
            ways = asyncio.run(measure(server, asked.history, asked.turns))

    def row(way: Way) -> list[object]:
        usage = way.turns[-1].response["usage"]
        share = usage["input_tokens_details"]["cached_tokens"] / usage["input_tokens"]
        columns = (lambda t: t.sent, lambda t: t.received, lambda t: t.first, lambda t: t.whole, lambda t: t.cpu)
        figures = [f"{median(map(column, way.turns)):,.0f}" for column in columns]
        return [way.name, usage["input_tokens"], f"{100 * share:.1f} %", *figures]

    head = "way | tokens at the end | reused | bytes sent | bytes received | ms to the first text | ms | CPU ms"
    print(table(head, map(row, ways)))


if __name__ == "__main__":
    main()
