"""Overload test: sends ten times the requests that the server can serve for two minutes, and checks the answers.

    make bench-overload [ARGS="--seconds 120 --times 10 --tokens 256"]

First the peak: as many clients as serve it best, each asking again when it has its answer. Then requests come at ten
times that rate, each on a connection of its own, whatever becomes of the earlier ones. Then the peak once more, as a
shared machine is not the same for minutes: what counts is the mean of both. All requests must be answered, with 200, or
with 429 or 503 and Retry-After; the served ones must be 90 % of the peak, and /health stay under 100 ms (p99). The exit
status tells whether all of that was so.

The clients take cores as well: with short replies of a small model on a small machine they, the refusals and the engine
together want more than there is.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from server.engine.process_tree import resident
from tools.running import serving

CLIENTS = (64, 128, 256)  # among these is the peak
PEAK_SECONDS = 15.0
WARM_SECONDS = 10.0  # until the queue is full, which is not counted
PATIENCE = 300.0  # for an answer
WORDS = "red blue green seven eight apple pear river stone cloud winter summer".split()


@dataclass
class Outcome:
    """What became of the requests: when each 200 came, and how long the others took."""

    statuses: Counter[str] = field(default_factory=Counter)
    served: list[float] = field(default_factory=list)  # by time.perf_counter
    refused: list[float] = field(default_factory=list)  # seconds
    faults: Counter[str] = field(default_factory=Counter)

    def rate(self, since: float, until: float) -> float:
        return sum(since <= when <= until for when in self.served) / (until - since)


async def ask(host: str, port: int, tokens: int, outcome: Outcome) -> None:
    """One request for ``tokens``, half of them more or less, on a connection of its own."""
    said, tokens = " ".join(random.choices(WORDS, k=8)), random.randint(tokens // 2, tokens * 3 // 2)
    body = {"messages": [{"role": "user", "content": said}], "max_tokens": tokens, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    began = time.perf_counter()
    try:
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(head.encode() + data)
                answer = await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        outcome.faults[type(error).__name__] += 1
        return
    status = answer[9:12].decode(errors="replace")
    outcome.statuses[status] += 1
    if status == "200":
        outcome.served.append(time.perf_counter())
    elif status in ("429", "503") and b"\r\nretry-after: " in answer.partition(b"\r\n\r\n")[0]:
        outcome.refused.append(time.perf_counter() - began)
    else:
        outcome.faults[f"{status or 'nothing'} without Retry-After"] += 1


async def served_by(host: str, port: int, tokens: int, clients: int) -> float:
    """Requests a second that so many clients get served, each asking again when it has its answer."""
    outcome = Outcome()
    began = time.perf_counter()

    async def client() -> None:
        while time.perf_counter() < began + PEAK_SECONDS:
            await ask(host, port, tokens, outcome)

    await asyncio.gather(*(client() for _ in range(clients)))
    rate = len(outcome.served) / (max(outcome.served) - began)
    print(f"{clients} clients: {rate:.1f} requests/s, {dict(outcome.statuses)}", flush=True)
    return rate


async def peak(host: str, port: int, tokens: int) -> tuple[float, int]:
    """The most requests a second that are served, and the number of clients that needs."""
    return max([(await served_by(host, port, tokens, clients), clients) for clients in CLIENTS])


async def overload(host: str, port: int, tokens: int, rate: float, seconds: float) -> tuple[Outcome, float]:
    """Requests at ``rate`` a second for so long: what became of them, and the rate of the served ones meanwhile."""
    outcome = Outcome()
    began = time.perf_counter()
    tasks = set()
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
        task = asyncio.create_task(ask(host, port, tokens, outcome))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    over = time.perf_counter()
    print(f"{int(rate * seconds)} requests in {over - began:.0f} s, {len(tasks)} under way at the end", flush=True)
    await asyncio.gather(*tasks)
    return outcome, outcome.rate(began + WARM_SECONDS, over)


@contextmanager
def probing(host: str, port: int) -> Iterator[list[float]]:
    """The seconds that /health took, ten a second, each on a new connection; ``PATIENCE`` where it was not well."""
    times: list[float] = []
    over = threading.Event()

    def probe() -> None:
        while not over.wait(0.1):
            began = time.perf_counter()
            connection = http.client.HTTPConnection(host, port, timeout=PATIENCE)
            try:
                connection.request("GET", "/health")
                well = connection.getresponse().status == 200
            except OSError:
                well = False
            connection.close()
            times.append(time.perf_counter() - began if well else PATIENCE)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield times
    finally:
        over.set()
        thread.join()


def at(times: list[float], part: float) -> float:
    return 1000 * sorted(times)[min(len(times) - 1, int(part * len(times)))] if times else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--times", type=float, default=10)
    parser.add_argument("--tokens", type=int, default=256, help="of a reply, on average")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving("", Path(folder)) as server:
        host, port = str(urlsplit(server.url).hostname), int(urlsplit(server.url).port or 80)
        before_it, clients = uvloop.run(peak(host, port, arguments.tokens))
        before = resident(server.pid)
        with probing(host, port) as health:
            outcome, served = uvloop.run(
                overload(host, port, arguments.tokens, arguments.times * before_it, arguments.seconds)
            )
        grown = (resident(server.pid) - before) / 2**20
        best = (before_it + uvloop.run(served_by(host, port, arguments.tokens, clients))) / 2
    print(f"answers: {dict(outcome.statuses)}, without one or wrong: {dict(outcome.faults)}")
    print(f"peak {best:.1f} requests/s, under overload {served:.1f}: {100 * served / best:.0f} %")
    print(f"refused in {at(outcome.refused, 0.5):.0f} ms, p99 {at(outcome.refused, 0.99):.0f} ms")
    print(f"/health in {at(health, 0.5):.0f} ms, p99 {at(health, 0.99):.0f} ms; the server grew by {grown:.0f} MiB")
    well = not outcome.faults and served >= 0.9 * best and at(health, 0.99) < 100
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
