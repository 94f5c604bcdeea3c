"""Starts a server for benchmarks, sends it turns, and reads its CPU time, I/O counters and metrics (Linux only)."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from server.cli.bench import bench
from server.config.usage_error import UsageError
from server.engine.process_tree import cpu_seconds


@dataclass
class Turn:
    """What one turn answered: token counts from ``usage``, the receipt from ``cache``."""

    prompt: int
    output: int
    cache: dict[str, Any]

    @property
    def history(self) -> int:
        """Tokens of the session when the turn is over; all but the last one are cached."""
        return self.prompt + self.output

    @property
    def reused(self) -> int:
        return sum(self.cache["reused"].values())


@dataclass
class Server:
    """A running server, and how to talk to it. Turns are stateful: they bring what is new, the log has the rest."""

    pid: int
    url: str
    client: httpx.AsyncClient

    async def say(self, session: str, words: str, tokens: int) -> Turn:
        """The next turn of a session, with a reply of that many tokens. RuntimeError where it is refused."""
        body = {"messages": [{"role": "user", "content": words}], "max_tokens": tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        answer = await self.client.post(f"{self.url}/v1/sessions/{session}/chat/completions", json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {answer.text[:200]}")
        reply = answer.json()
        return Turn(reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"], reply["cache"])

    async def time_turn(self, session: str, words: str) -> tuple[Turn, float, float]:
        """A turn with a reply of one token while nothing else runs, and its milliseconds of CPU and of wall time."""
        cpu, began = self.cpu(), time.perf_counter()
        turn = await self.say(session, words, 1)
        wall = time.perf_counter() - began
        return turn, 1000 * (self.cpu() - cpu), 1000 * wall

    def cpu(self) -> float:
        """CPU seconds of both processes since they were started."""
        return cpu_seconds(self.pid) or 0.0

    @property
    def engine(self) -> int:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        commands = {int(child): Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0") for child in children}
        return next(pid for pid, command in commands.items() if b"scheduler" in command)

    @property
    def stored_writes(self) -> int:
        """Bytes that both processes gave to the file system, in its pages: KV, log and journal."""
        return io_count(self.pid, "write_bytes") + io_count(self.engine, "write_bytes")

    @property
    def stored_reads(self) -> int:
        """Bytes that the engine had to read from the storage device itself."""
        return io_count(self.engine, "read_bytes")

    async def metric(self, name: str) -> float:
        """A gauge or counter of /metrics without labels."""
        page = (await self.client.get(f"{self.url}/metrics")).text
        return next(float(line.split()[1]) for line in page.splitlines() if line.startswith(f"warmturn_{name} "))

    async def token_bytes(self) -> int:
        models = (await self.client.get(f"{self.url}/v1/models")).json()
        return int(models["data"][0]["warmturn"]["kv_bytes_per_token"])

    async def settle(self) -> None:
        """Until everything idle is on disk and the engine, which tells once a second, has told so."""
        calm = 0
        while calm < 4:
            await asyncio.sleep(0.4)
            busy = await self.metric("disk_pending_sessions") + await self.metric("running")
            calm = 0 if busy else calm + 1


@contextmanager
def serving(model: str, data: Path, *flags: str) -> Iterator[Server]:
    """A server of a model (empty: the demo's) on a data dir, ready; stopped with SIGTERM, its end awaited."""
    try:
        with bench.started([*([model] if model else []), "--data-dir", str(data), *flags], os.environ) as (url, pid):
            yield Server(pid, url, httpx.AsyncClient(timeout=600))
    except UsageError as error:
        raise SystemExit(str(error)) from None


def io_count(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split(": ")[1]) for line in lines if line.startswith(f"{name}: "))
