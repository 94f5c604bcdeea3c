"""Benchmark of the tiers: restarts, turns from disk, bytes written, many sessions, and the cost of write-behind.

    python -m tools.bench_tiers [restart] [turn] [written] [many] [behind] [--out FILE]

Nothing named: all five, about twenty minutes of one core. Starts real servers on data dirs of its own. CPU time is that
of server and engine process (Linux): on a shared machine compare it, not wall time. What was done several times is
given as its median.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from server.cli.bench.bench_load import WORDS
from server.cli.bench.bench_report import about
from server.engine.process_tree import resident
from tools import random_model
from tools.running import Server, Turn, serving
from tools.tables import table

TIERS = ("device", "host", "disk")
WORD = 2.9  # tokens, in the demo model's tokenizer
FRAME = 8  # tokens that the template puts around a message, about
GIB = 1 << 30


def words(rng: random.Random, tokens: int) -> str:
    """A message of made-up words that adds about that many tokens to a session."""
    return " ".join(rng.choices(WORDS, k=max(1, round((tokens - FRAME) / WORD))))


# -- a clean restart --------------------------------------------------------------------------------------------------


async def restart(models: Path, scratch: Path) -> str:
    """Eight sessions of four turns, all at once; then a new server, and one more turn of each."""
    model, rng = str(models / "llama"), random.Random(1)
    sessions = [f"s{number}" for number in range(8)]

    async def chat(server: Server, session: str) -> Turn:
        for _ in range(4):
            turn = await server.say(session, words(rng, rng.randint(20, 200)), rng.randint(8, 24))
        return turn

    with serving(model, scratch) as server:
        before = await asyncio.gather(*(chat(server, session) for session in sessions))
        stopping = time.perf_counter()
    stopped = time.perf_counter()
    with serving(model, scratch) as server:
        up, cpu = time.perf_counter(), server.cpu()
        after = [await server.say(session, words(rng, 16), 1) for session in sessions]
    rows = []
    for name, old, new in zip(sessions, before, after, strict=True):
        tiers = [new.cache["reused"][tier] for tier in TIERS]
        rows.append((name, old.history, new.reused, *tiers, f"{100 * new.reused / old.history:.1f} %"))
    return (
        "## A clean restart: 8 sessions of 4 turns, llama-135m's shape\n\n"
        f"Stopped in {stopped - stopping:.1f} s, ready again in {up - stopped:.1f} s of wall, {cpu:.1f} s of CPU time: "
        "imports, loading and measuring the model included.\n\n"
        + table("session | history, tokens | cached | device | host | disk | cached / history", rows)
    )


# -- a short turn on a long history -----------------------------------------------------------------------------------


async def turn(models: Path, scratch: Path) -> str:
    """A short turn on 4,000 tokens: warm, from disk, from disk without the page cache, computed anew."""
    model, rng = str(models / "llama"), random.Random(2)
    sessions = [f"s{number}" for number in range(5)]
    rows: list[list[str]] = []

    async def ask_all(server: Server, label: str) -> None:
        await server.say(f"first-{len(rows)}", words(rng, 600), 8)  # a server's first prompts cost more
        found, read = [], 0
        for session in sessions:
            await server.settle()
            if "dropped" in label:
                drop_page_cache(scratch)
            before = server.stored_reads
            found.append(await server.time_turn(session, words(rng, 16)))
            read += server.stored_reads - before
        rows.append(turn_row(label, found, read))

    with serving(model, scratch) as server:
        for session in sessions:
            for _ in range(4):
                await server.say(session, words(rng, 984), 16)
        await ask_all(server, "warm, on the device")
    for label in ("disk, page cache warm", "disk, page cache dropped"):
        with serving(model, scratch) as server:
            await ask_all(server, label)
    with serving(model, scratch, "--disk-space", "0") as server:
        await ask_all(server, "computed anew")
    head = (
        "history | cached tokens | new | CPU ms, median of 5 | each | wall ms | each | load_ms | read from storage, MB"
    )
    title = "## A short turn on about 4,000 tokens, llama-135m's shape: request to the reply of one token"
    return f"{title}\n\n{table(head, rows)}"


def turn_row(label: str, found: list[tuple[Turn, float, float]], read: int) -> list[str]:
    """One line of the table of ``turn``."""
    turns = [turn for turn, _, _ in found]
    cells = [label, f"{median(t.reused for t in turns):,.0f}", f"{median(t.cache['new'] for t in turns):.0f}"]
    for values in ([cpu for _, cpu, _ in found], [wall for _, _, wall in found]):
        cells += [f"{median(values):.0f}", ", ".join(f"{value:.0f}" for value in values)]
    return [*cells, f"{median(t.cache['load_ms'] for t in turns):.0f}", f"{read / len(turns) / 1e6:.0f}"]


def drop_page_cache(folder: Path) -> None:
    """Have the kernel forget the stored KV."""
    for path in folder.rglob("*.kv"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# -- bytes written ----------------------------------------------------------------------------------------------------


async def measure_writes(models: Path, scratch: Path) -> str:
    """Bytes to disk for turns of some sizes, against the KV that they added."""
    rows = []
    for label, model, largest in (("llama-135m's shape", str(models / "llama"), 1000), ("demo", "", 300)):
        for codec in ("exact", "int8"):
            with serving(model, scratch / label / codec, "--kv-at-rest", codec) as server:
                for size in (20, 100, largest):
                    rows.append([label, codec, *await write_turns(server, size)])
    head = "model | at rest | new tokens of a turn | new KV, bytes | KV written, bytes | written / new | with the log"
    return f"## Bytes written per turn, median of 5\n\n{table(head, rows)}"


async def write_turns(server: Server, size: int) -> list[str]:
    """Turns of that many tokens on one session, each on disk before the next."""
    rng, session = random.Random(size), f"by-{size}"
    last = await server.say(session, words(rng, 40), 4)
    each = await server.token_bytes()
    new, stored, every = [], [], []
    for _ in range(5):
        await server.settle()
        before, all_before = await server.metric("disk_written_bytes_total"), server.stored_writes
        now = await server.say(session, words(rng, size - 4), 4)
        await server.settle()
        new.append((now.history - last.history) * each)
        stored.append(await server.metric("disk_written_bytes_total") - before)
        every.append(server.stored_writes - all_before)
        last = now
    counts = [f"{median(new) / each:.0f}", f"{median(new):,.0f}", f"{median(stored):,.0f}"]
    return [*counts, f"{sum(stored) / sum(new):.3f}", f"{sum(every) / sum(new):.3f}"]


# -- many sessions ----------------------------------------------------------------------------------------------------


@dataclass
class Round:
    """What became of one turn of each of many sessions."""

    errors: list[str] = field(default_factory=list)
    known: int = 0  # tokens of prompts that had been computed before
    reused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))
    whole: int = 0  # turns that reused all of these
    misses: dict[str, int] = field(default_factory=dict)
    memory: list[tuple[int, int, int]] = field(default_factory=list)  # turns done, bytes of engine and of server
    wall: float = 0.0
    cpu: float = 0.0

    def take(self, turn: Turn, known: int) -> None:
        """Count a turn on a session of which ``known`` tokens had been computed."""
        self.known += known
        self.whole += turn.reused >= known
        for tier in TIERS:
            self.reused[tier] += turn.cache["reused"][tier]
        if turn.cache["miss"] is not None:
            reason = turn.cache["miss"]["reason"]
            self.misses[reason] = self.misses.get(reason, 0) + 1


async def many(models: Path, scratch: Path, count: int = 1000, near: int = 20, host: int = 50) -> str:
    """Sessions of 1,000 tokens, far more than memory holds; each is continued in random order, then some more often."""
    rng, each = random.Random(4), 1024 * 1024  # a token of the demo model takes 1,024 bytes
    flags = ("--kv-memory", str(near * each), "--host-memory", str(host * each), "--disk-space", "8G")
    names = [f"s{number}" for number in range(count)]
    lengths: dict[str, int] = {}
    rounds = []
    with serving("", scratch, *flags) as server:
        assert await server.token_bytes() * 1024 == each
        fresh = server.cpu()
        rounds.append(await one_round(server, names, lengths, rng, 1000))
        await server.settle()
        tokens = median(lengths.values())
        disk = await server.metric("disk_bytes") / max(1.0, await server.metric("disk_sessions"))
        rng.shuffle(names)
        rounds.append(await one_round(server, names, lengths, rng, 16))
        often = [rng.choice(names[:60] if rng.random() < 0.8 else names) for _ in names]
        rounds.append(await one_round(server, often, lengths, rng, 16))
    with serving("", scratch, *flags) as server:
        again, files = server.cpu(), sum(1 for _ in scratch.rglob("*.kv"))
    pages = -(-(tokens - 1) // 16) * 16 * 1024
    rows = [("device, host", f"{pages:,.0f}", f"{GIB / pages:,.0f}"), ("disk", f"{disk:,.0f}", f"{GIB / disk:,.0f}")]
    return "\n\n".join(
        (
            f"## {count:,} sessions of {tokens:,.0f} tokens, demo; the device holds {near}, host memory {host}",
            round_table(rounds),
            "".join(f"    {error}\n" for error in [e for r in rounds for e in r.errors][:5]) + memory_table(rounds),
            table("tier | bytes of a session | sessions per GiB", rows),
            f"Start to ready: {fresh:.1f} s of CPU time with an empty data dir, {again:.1f} s with {files:,} files.",
        )
    )


async def one_round(server: Server, names: list[str], lengths: dict[str, int], rng: random.Random, size: int) -> Round:
    """A turn of ``size`` tokens of each of these sessions, four at a time; ``lengths`` are kept up to date."""
    out, queue, engine = Round(), iter(names), server.engine
    held: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # a session runs one turn at a time
    done, cpu, began = 0, server.cpu(), time.perf_counter()

    async def worker() -> None:
        nonlocal done
        for name in queue:
            try:
                async with held[name]:
                    turn = await server.say(name, words(rng, size - 4), 4)
                    out.take(turn, max(0, lengths.get(name, 1) - 1))
                    lengths[name] = turn.history
            except (RuntimeError, httpx.HTTPError) as error:
                out.errors.append(f"{type(error).__name__}: {error}")
            done += 1
            if done % (len(names) // 5) == 0:
                out.memory.append((done, resident(engine), resident(server.pid)))

    await asyncio.gather(*(worker() for _ in range(4)))
    out.wall, out.cpu = time.perf_counter() - began, server.cpu() - cpu
    return out


def round_table(rounds: list[Round]) -> str:
    """What became of the turns, and what was reused of all that had been computed."""
    rows = []
    for number, out in enumerate(rounds, 1):
        turns = len(out.memory) and out.memory[-1][0]
        shares = [f"{100 * out.reused[tier] / out.known:.1f} %" if out.known else "-" for tier in TIERS]
        misses = ", ".join(f"{count} {reason}" for reason, count in out.misses.items()) or "none"
        costs = [f"{1000 * seconds / max(1, turns):.1f}" for seconds in (out.cpu, out.wall)]
        rows.append((number, turns, len(out.errors), *shares, out.whole if out.known else "-", misses, *costs))
    head = "round | turns | errors | reused from device | from host | from disk | turns that reused all | misses"
    return table(f"{head} | CPU ms a turn | wall ms a turn", rows)


def memory_table(rounds: list[Round]) -> str:
    """Memory of both processes over the rounds."""
    rows = [
        (f"{number}, {done}", f"{engine / 1e6:.1f}", f"{server / 1e6:.1f}")
        for number, out in enumerate(rounds, 1)
        for done, engine, server in out.memory
    ]
    return table("round, turns done | engine, RssAnon, MB | server, RssAnon, MB", rows)


# -- write-behind -----------------------------------------------------------------------------------------------------


async def behind(models: Path, scratch: Path) -> str:
    """The same chats on a server with and on one without a disk tier, by turns."""
    model = str(models / "llama")
    rates: dict[str, list[float]] = {"without a disk tier": [], "with it": []}
    with (
        serving(model, scratch / "without", "--disk-space", "0", "--kv-memory", "1G") as without,
        serving(model, scratch / "with", "--kv-memory", "1G") as beside,
    ):
        for number in range(6):
            for label, server in zip(rates, (without, beside), strict=True):
                rate = await output_rate(server, number)
                if number:  # the first one warms up
                    rates[label].append(rate)
    off, on = (median(values) for values in rates.values())
    rows = [(label, f"{median(values):.2f}", ", ".join(f"{v:.2f}" for v in values)) for label, values in rates.items()]
    return (
        "## What write-behind costs: 4 sessions of 4 turns, 40 tokens in, 48 out, llama-135m's shape\n\n"
        + table("server | output tokens per CPU-second, median | each of 5 runs", rows)
        + f"\n\nWith the disk tier: {100 * (on / off - 1):+.1f} %."
    )


async def output_rate(server: Server, number: int) -> float:
    """Output tokens per CPU-second of one run, what is written after it included."""
    rng = random.Random(number)
    said = [[words(rng, 40) for _ in range(4)] for _ in range(4)]
    cpu = server.cpu()

    async def chat(at: int) -> int:
        return sum([(await server.say(f"run{number}-{at}", text, 48)).output for text in said[at]])

    output = sum(await asyncio.gather(*(chat(at) for at in range(4))))
    await server.settle()
    return output / (server.cpu() - cpu)


# ---------------------------------------------------------------------------------------------------------------------

MEASURES: dict[str, Callable[[Path, Path], Coroutine[Any, Any, str]]] = {
    "restart": restart,
    "turn": turn,
    "written": measure_writes,
    "many": many,
    "behind": behind,
}


def main() -> None:
    """Measure what is asked for, print it, write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measures", nargs="*", choices=[*MEASURES, []], help="nothing: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the tables to this file")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    parts = [about(f"{args.threads} compute threads", ())]
    print(parts[0], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        random_model.make(Path(folder) / "llama")
        for name in args.measures or MEASURES:
            parts.append(asyncio.run(MEASURES[name](Path(folder), Path(folder) / name)))
            print("\n" + parts[-1], flush=True)
    if args.out:
        args.out.write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
