"""`warmturn bench`: multi-turn chats against a running server, or against one that it starts."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, TextIO
from urllib.parse import urlsplit

import httpx

from server import __version__
from server.cli.bench.bench_load import BenchLoad, Client, NoAnswer
from server.cli.bench.bench_report import HEAD, about, figures, reading_line, row, weight_reading
from server.config.bench_options import BenchConfig
from server.config.usage_error import UsageError
from server.engine.launcher import engine_environment
from server.engine.process_tree import last_line, listener
from server.serve import listening

START_SECONDS = 1800.0  # for a large model; one that cannot be served ends sooner
STOP_SECONDS = 60.0
TURN_SECONDS = 600.0
SERVED = "bench"  # the name of a model that is served for this
HERE = ("127.0.0.1", "localhost", "::1")


def bench(config: BenchConfig, terminal: TextIO | None = None) -> int:
    """Measure, print the table and write the report; the exit status: 1 where turns failed. Raises UsageError."""
    out = terminal or sys.stdout
    try:
        if config.is_url:
            return asyncio.run(measure_loads(config, config.subject, config.model, pid_of(config), out))
        tell(f"starting a server of {config.subject}")
        with serving(config) as (url, pid):
            return asyncio.run(measure_loads(config, url, SERVED, pid, out))
    except NoAnswer as error:
        print(f"warmturn: {error}", file=sys.stderr)
        return 1


async def measure_loads(config: BenchConfig, url: str, model: str | None, pid: int | None, out: TextIO) -> int:
    """Run every load, tell of each as it is done; the exit status. Raises NoAnswer."""
    base = url.rstrip("/").removesuffix("/v1") + "/v1/"
    headers = {"authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=TURN_SECONDS, limits=limits) as http:
        client = Client(http, model or await first_model(http, url), pid, config.session_header)
        tell("warming up")
        await client.warm_up()
        rows, loads = [HEAD], []
        show(out, config, HEAD)
        tell(f"measuring: {len(config.sessions) + len(config.history)} rows, each shown when it is done")
        for load in [*(client.chats(n, config.turns) for n in config.sessions), *map(client.history, config.history)]:
            loads.append(await load)
            rows.append(row(loads[-1]))
            show(out, config, rows[-1])
        read = weight_reading(await client.facts(), loads)
    what = url if config.is_url else f"{config.subject}, {config.threads} compute threads"
    told = about(what, client.left_out)
    told += f"\n{reading_line(read)}" if read else ""
    report(config, told, "\n".join(rows), loads, out, read)
    failed = [turn.error for load in loads for chat in load.chats for turn in chat if turn.error is not None]
    for error in sorted(set(failed)):
        print(f"warmturn: {failed.count(error)} turns failed: {error}", file=sys.stderr)
    return 1 if failed else 0


def report(
    config: BenchConfig, told: str, table: str, loads: list[BenchLoad], out: TextIO, read: dict[str, float]
) -> None:
    """The end of the output, and the file. Raises UsageError where it cannot be written."""
    if config.as_json:
        answer: dict[str, Any] = {"object": "bench", "version": __version__, "about": told}
        answer |= {"loads": [figures(load) for load in loads], "weight_reading": read or None}
        json.dump(answer, out, indent=2, ensure_ascii=False)
        out.write("\n")
    else:
        out.write(f"\n{told}\n")
    if config.out is not None:
        try:
            config.out.parent.mkdir(parents=True, exist_ok=True)
            config.out.write_text(f"{told}\n\n{table}\n")
        except OSError as error:
            raise UsageError(f"--out: {config.out} cannot be written: {error.strerror}") from None


def show(out: TextIO, config: BenchConfig, line: str) -> None:
    """A line of the table, as soon as it is there."""
    if not config.as_json:
        out.write(f"{line}\n")
        out.flush()


def tell(doing: str) -> None:
    """Print what is being done, for the waiting user."""
    print(f"warmturn: {doing}", file=sys.stderr, flush=True)


async def first_model(http: httpx.AsyncClient, url: str) -> str:
    """The first model that the server names. Raises NoAnswer, UsageError."""
    try:
        answer = await http.get("models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        if error.response.status_code == 401:
            raise UsageError("--api-key: the server refused this key, or needs one") from None
        raise NoAnswer(f"{url} answers {error.response.status_code} to a request for its models") from None
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise NoAnswer(f"no server of OpenAI's API answers at {url} ({type(error).__name__})") from None


def pid_of(config: BenchConfig) -> int | None:
    """The process of a server on this machine."""
    where = urlsplit(config.subject)
    if config.pid is not None or where.hostname not in HERE:
        return config.pid
    return listener(where.port or (443 if where.scheme == "https" else 80))


@contextmanager
def serving(config: BenchConfig) -> Iterator[tuple[str, int]]:
    """`warmturn serve` on a free port and a data dir of its own; where it answers, and its pid. Raises UsageError."""
    with tempfile.TemporaryDirectory() as data:
        flags = [config.subject, "--served-model-name", SERVED, "--data-dir", data, *config.serve_flags]
        ours = {name: value for name, value in engine_environment().items() if not name.startswith("WARMTURN_")}
        with started(flags, ours | {"OMP_NUM_THREADS": str(config.threads)}) as server:
            yield server


@contextmanager
def started(flags: Sequence[str], environment: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """`warmturn serve` on a free port, ready, and ended in order; where it answers, and its pid. Raises UsageError."""
    with listening("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as said:
        command = [sys.executable, "-P", "-m", "server", "serve", "--port", str(port), *flags]
        process = subprocess.Popen(command, env=environment, stdout=said, stderr=said)
        try:
            url = f"http://127.0.0.1:{port}"
            wait(url, process, said)
            yield url, process.pid
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait(url: str, process: subprocess.Popen[bytes], said: IO[bytes]) -> None:
    """Until the server is ready. Raises UsageError with its last words where it ends before."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            raise UsageError(f"the server did not start: {last_line(said).removeprefix('warmturn: ')}")
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise UsageError(f"the server was not ready within {START_SECONDS / 60:.0f} minutes")
