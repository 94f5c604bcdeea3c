"""Multi-turn chat against a server: output tokens per server-CPU-second, time to first token, tokens reused.

    python tools/bench.py [MODEL] [--sessions 1,4,16] [--turns 4] [--threads 1] [--history 512,1024,...]
    python tools/bench.py --url http://127.0.0.1:8001/v1 --model NAME       any OpenAI-compatible server, wall time only

Starts ``warmturn serve MODEL`` itself unless given a URL. Every session re-sends its whole history each turn,
as OpenAI clients do. CPU seconds are those of the server's whole process tree (Linux): on a shared machine
compare them, not wall time; with one thread no spinning is counted. Writes a table to ``--out`` with machine,
versions and date.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

PORT = 8123
WORDS = (
    "about above again because before between could during every first found great house large later "
    "learn light little might never night other paper place plant point right river school small sound "
    "still story study their there these thing think three under until water where which while white "
    "world would write young answer animal mother number"
).split()


@dataclass
class Turn:
    """What one turn showed: seconds to the first token and in all, token counts from ``usage``."""

    first: float = 0.0
    total: float = 0.0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    text: str = ""


@dataclass
class Result:
    """One run with one number of sessions."""

    label: str
    wall: float
    cpu: float | None
    turns: list[list[Turn]] = field(default_factory=list)

    def row(self) -> str:
        """One line of the table."""
        every = [turn for session in self.turns for turn in session]
        output = sum(turn.output for turn in every)
        later = [turn for session in self.turns for turn in session[1:]]
        cpu = f"{output / self.cpu:.1f}" if self.cpu else "-"
        share = 100 * sum(t.cached for t in every) / max(1, sum(t.prompt for t in every))
        first = 1000 * statistics.median(session[0].first for session in self.turns)
        warm = f"{1000 * statistics.median(t.first for t in later):.0f}" if later else "-"
        return f"| {self.label} | {output} | {cpu} | {output / self.wall:.1f} | {first:.0f} | {warm} | {share:.0f} % |"


HEAD = (
    "| load | output tokens | per server-CPU-second | per wall second | first turn, ms to first token "
    "| later turns | cached |\n|---|---|---|---|---|---|---|"
)


async def turn(client: httpx.AsyncClient, model: str, messages: list[dict[str, str]], tokens: int) -> Turn:
    """One streamed turn of exactly ``tokens`` tokens where the server allows it."""
    body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "ignore_eos": True}
    out, began = Turn(), time.perf_counter()
    async with client.stream("POST", "chat/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"bench: {response.status_code} {(await response.aread()).decode()[:200]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk: dict[str, Any] = json.loads(line[6:])
            if "error" in chunk:
                raise SystemExit(f"bench: {chunk['error']}")
            text = "".join(c["delta"].get("content") or "" for c in chunk["choices"])
            if text and not out.first:
                out.first = time.perf_counter() - began
            out.text += text
            if usage := chunk.get("usage"):
                out.prompt, out.output = usage["prompt_tokens"], usage["completion_tokens"]
                out.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    out.total = time.perf_counter() - began
    out.first = out.first or out.total
    return out


def say(rng: random.Random, words: int) -> dict[str, str]:
    """A message of made-up words."""
    return {"role": "user", "content": " ".join(rng.choices(WORDS, k=words))}


async def session(client: httpx.AsyncClient, model: str, seed: int, turns: int) -> list[Turn]:
    """One chat: 20 to 60 words in, 32 to 96 tokens out, the reply appended as it came."""
    rng = random.Random(seed)
    messages: list[dict[str, str]] = []
    out = []
    for _ in range(turns):
        messages.append(say(rng, rng.randint(20, 60)))
        out.append(await turn(client, model, messages, rng.randint(32, 96)))
        messages.append({"role": "assistant", "content": out[-1].text})
    return out


async def chat(client: httpx.AsyncClient, model: str, sessions: int, turns: int, pid: int | None) -> Result:
    """``sessions`` chats at once."""
    cpu, began = cpu_seconds(pid), time.perf_counter()
    done = await asyncio.gather(*(session(client, model, 100 * sessions + i, turns) for i in range(sessions)))
    wall = time.perf_counter() - began
    return Result(f"{sessions} sessions, {turns} turns", wall, _since(cpu, pid), list(done))


async def history(client: httpx.AsyncClient, model: str, size: int, pid: int | None) -> Result:
    """A 16-word turn on about ``size`` tokens of history, the median of three."""
    rng = random.Random(size)
    messages = [say(rng, size // 2)]
    reply = await turn(client, model, messages, 2)
    while reply.prompt < size - 32:
        messages += [{"role": "assistant", "content": reply.text}, say(rng, max(8, (size - reply.prompt) // 3))]
        reply = await turn(client, model, messages, 2)
    cpu, began, warm = cpu_seconds(pid), time.perf_counter(), []
    for _ in range(3):
        messages += [{"role": "assistant", "content": reply.text}, say(rng, 16)]
        reply = await turn(client, model, messages, 1)
        warm.append(reply)
    wall, spent = time.perf_counter() - began, _since(cpu, pid)
    label = f"16 words on {reply.prompt} tokens" + (f", {1000 * spent / 3:.0f} CPU ms" if spent else "")
    return Result(label, wall, spent, [warm])


def cpu_seconds(pid: int | None) -> float | None:
    """CPU seconds that a process and its live descendants have used (Linux)."""
    if pid is None:
        return None
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents.setdefault(int(entry.read_text().rsplit(")", 1)[1].split()[1]), []).append(int(entry.parent.name))
        except OSError:
            continue
    todo, total = [pid], 0.0
    while todo:
        one = todo.pop()
        todo += parents.get(one, [])
        for task in Path(f"/proc/{one}/task").glob("*/schedstat"):
            try:
                total += int(task.read_text().split()[0]) / 1e9
            except OSError:
                continue
    return total


def _since(before: float | None, pid: int | None) -> float | None:
    now = cpu_seconds(pid)
    return None if before is None or now is None else now - before


@contextmanager
def server(model: str, threads: int, extra: list[str]) -> Iterator[int]:
    """``warmturn serve`` on a port of ours; yields its pid."""
    with tempfile.TemporaryDirectory() as data:
        command = [sys.executable, "-m", "server", "serve", *([model] if model else []), "--port", str(PORT)]
        command += ["--served-model-name", "bench", "--data-dir", data, *extra]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        process = subprocess.Popen(command, env=environment)
        try:
            _wait(f"http://127.0.0.1:{PORT}/health", process)
            yield process.pid
        finally:
            process.terminate()
            process.wait(30)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(1800):
        if process.poll() is not None:
            raise SystemExit("bench: the server ended before it was ready")
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise SystemExit("bench: the server was not ready in three minutes")


async def measure(args: argparse.Namespace, url: str, model: str, pid: int | None) -> str:
    """Run every load; the table."""
    rows = [HEAD]
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        await turn(client, model, [say(random.Random(0), 24)], 16)  # warm-up
        for count in (int(n) for n in args.sessions.split(",") if n):
            rows.append((await chat(client, model, count, args.turns, pid)).row())
            print(rows[-1], flush=True)
        for size in (int(n) for n in args.history.split(",") if n):
            rows.append((await history(client, model, size, pid)).row())
            print(rows[-1], flush=True)
    return "\n".join(rows)


def about(args: argparse.Namespace) -> str:
    """Machine, versions, date: what a figure means nothing without."""
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?")
    versions = ", ".join(f"{name} {version(name)}" for name in ("warmturn", "torch", "transformers"))
    date = datetime.now(UTC).date().isoformat()
    return f"{date}; {cpu}, {os.cpu_count()} cores, {platform.system()}; {versions}; {args.threads} compute thread(s)"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="", help="hub id or folder; nothing: the demo model")
    parser.add_argument("--url", help="measure this server instead of starting one")
    parser.add_argument("--model", default="bench", help="model name to ask for (with --url)")
    parser.add_argument("--pid", type=int, help="the server's pid (with --url), to count its CPU seconds")
    parser.add_argument("--sessions", default="1,4,16")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--history", default="", help="history sizes in tokens, comma-separated")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the table to this file")
    args, extra = parser.parse_known_args()
    if args.url:
        table = asyncio.run(measure(args, args.url, args.model, args.pid))
    else:
        with server(args.folder, args.threads, extra) as pid:
            table = asyncio.run(measure(args, f"http://127.0.0.1:{PORT}/v1", "bench", pid))
    text = f"{about(args)}\n\n{table}\n"
    print("\n" + text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)


if __name__ == "__main__":
    main()
