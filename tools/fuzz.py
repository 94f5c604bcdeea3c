"""Sends random valid and invalid requests made from the server's OpenAPI document; fails on a 5xx or after 10 s.

    make test-fuzz [REQUESTS=20000]

They go to a server that this starts, of the demo model and of tiny ones that embed, score and hear (their makers are in
``tests``, which must be on the path). Half of the requests are what the document allows, half are not;
NUL bytes are on. Each route gets the same number. Half of them are tamed: about a session that is there, and without
what random requests never have right. Prints the failures as curl commands, the answers by status, and the memory of
both processes; the exit status tells whether all was well. Needs schemathesis, which the extra ``fuzz`` brings.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from pooling_kit import save_cross_encoder, save_embedder
from schemathesis import GenerationMode
from speech_models import save_speech_model

from server.engine.process_tree import resident
from tools.running import Server, serving

SECONDS = 10.0  # for one request, at most
ROUND = 100  # requests of each sort to a route, until the sessions are made anew
AT_ONCE = 4  # requests under way
SESSIONS = [f"fuzz-{number}" for number in range(5)]
RARELY_RIGHT = {"model", "session_id", "previous_response_id", "conversation", "prompt_cache_key", "cache_salt"}
RARELY_RIGHT |= {"regex", "grammar", "choice", "response_format", "text", "tools", "tool_choice", "logit_bias"}
RARELY_RIGHT |= {"max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "stop_token_ids", "best_of"}
RARELY_RIGHT |= {"top_logprobs", "logprobs", "stream_options", "reasoning", "continue_final_message", "functions"}
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
CHAT = "/v1/chat/completions"
LINE = json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": HELLO})
FORM: Any = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", f"{{}}\n{LINE}\n".encode())}}
KNOWN: dict[str, str] = {}  # parameters of paths -> ids of a file and a batch that are there
FLAGS = ("--max-context", "128", "--max-queued", "64", "--max-models", "4")  # what is generated stays short


@dataclass
class Tally:
    """What came back. ``slowest`` is in seconds."""

    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def total(self) -> int:
        return sum(self.statuses.values())

    def add(self, case: Any, url: str, response: Any, error: Exception | None, seconds: float) -> None:
        status = str(response.status_code) if response is not None else type(error).__name__
        fault = f"{status} after {seconds:.1f} s" if wrong(response) or seconds > SECONDS else None
        with self.lock:
            self.statuses[status] += 1
            self.slowest = max(self.slowest, seconds)
            if fault is not None and len(self.failures) < 100:
                said = response.text[:200] if response is not None else str(error)[:200]
                self.failures.append(f"{fault}: {said}\n    {command(case, url)}")
                print(self.failures[-1], flush=True)


def wrong(response: Any) -> bool:
    """Whether an answer is none, a failure of the server, or an error without its shape."""
    if response is None or response.status_code >= 500:
        return True
    if response.status_code < 400 or response.request.method == "HEAD":
        return False
    try:
        said = response.json()
        if response.request.path_url.startswith("/api/"):  # Ollama's shape
            return not isinstance(said["error"], str)
        if said.get("type") == "error":  # Anthropic's shape
            return not {"message", "type"} <= set(said["error"])
        return set(said["error"]) != {"message", "type", "param", "code"}
    except (ValueError, KeyError, TypeError, AttributeError):
        return True


def command(case: Any, url: str) -> str:
    """The request, to be tried again."""
    try:
        return str(case.as_curl_command(headers={}))[:2000].replace("http://localhost", url)
    except Exception as error:  # the case may be what curl cannot say
        return f"{case.method} {case.formatted_path} ({type(error).__name__}) {case.body!r}"[:2000]


def ask(case: Any, url: str, session: requests.Session, tally: Tally) -> None:
    began = time.perf_counter()
    response, error = None, None
    try:
        response = case.call(base_url=url, session=session, timeout=3 * SECONDS)
    except requests.exceptions.InvalidHeader:
        return  # the client does not send such a thing
    except requests.RequestException as failure:
        error = failure
    tally.add(case, url, response, error, time.perf_counter() - began)


def tame(case: Any, session: str) -> None:
    """Take out of a request what a random one never has right: the model, the session, a format of the reply; and put
    in the ids of what is there.
    """
    for name, id in {"session_id": session, **KNOWN}.items():
        if name in (case.path_parameters or {}):
            case.path_parameters[name] = id
        if isinstance(case.body, dict) and f"input_{name}" in case.body:
            case.body[f"input_{name}"] = id
    if isinstance(case.body, dict):
        for name in set(case.body) & RARELY_RIGHT:
            del case.body[name]


def fuzz(operation: Any, mode: Any, count: int, salt: int, send: Callable[[Any], None]) -> None:
    """``count`` requests to one route, or as many different ones as there are."""
    number = 0

    def each(case: Any) -> None:
        nonlocal number
        number += 1
        if number % 2:
            tame(case, SESSIONS[number // 2 % len(SESSIONS)])
        send(case)

    how = settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    with suppress(Unsatisfiable):  # a route that takes nothing has nothing that could be wrong
        seed(salt)(how(given(case=operation.as_strategy(generation_mode=mode))(each)))()


class Sender:
    """Sends requests, some at once, and waits for the oldest when there are too many."""

    def __init__(self, url: str, tally: Tally) -> None:
        self._url = url
        self._tally = tally
        self._pool = ThreadPoolExecutor(AT_ONCE)
        self._pending: deque[Future[None]] = deque()
        self._local = threading.local()

    def __call__(self, case: Any) -> None:
        self._pending.append(self._pool.submit(self._send, case))
        while len(self._pending) > 2 * AT_ONCE:
            self._pending.popleft().result()

    def _send(self, case: Any) -> None:
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
        ask(case, self._url, self._local.session, self._tally)

    def finish(self) -> None:
        while self._pending:
            self._pending.popleft().result()


def fill(server: Server) -> None:
    """Begin anew the sessions, the file and the batch that half of the requests are about."""
    for name in SESSIONS:
        path = f"{server.url}/v1/sessions/{name}"
        httpx.delete(path, timeout=60)
        httpx.post(f"{path}/chat/completions", json=HELLO, timeout=60).raise_for_status()
    file = httpx.post(f"{server.url}/v1/files", timeout=60, **FORM).raise_for_status().json()["id"]
    body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    batch = httpx.post(f"{server.url}/v1/batches", json=body, timeout=60)
    if batch.status_code != 429:  # those of earlier rounds still run
        KNOWN["batch_id"] = batch.raise_for_status().json()["id"]
    KNOWN["file_id"] = file


def run(server: Server, count: int) -> Tally:
    """``count`` requests over all routes, in rounds."""
    document = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
    schema = schemathesis.openapi.from_dict(document)
    schema.config.output.sanitization.update(enabled=False)  # what is shown can be tried again
    operations = [found.ok() for found in schema.get_all_operations()]
    tally, salt = Tally(), 0
    sender = Sender(server.url, tally)
    while (left := count - tally.total) > 0:
        salt += 1
        share = min(ROUND, max(1, -(-left // (2 * len(operations)))))
        for operation in operations:
            if any(f"{{{name}}}" in operation.path for name in ("session_id", "file_id", "batch_id")):
                fill(server)
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                fuzz(operation, mode, share, salt, sender)
            sender.finish()
        print(f"round {salt}: {tally.total} so far, {len(tally.failures)} wrong", flush=True)
    return tally


def others(folder: Path) -> list[str]:
    """Flags with models for the routes that the demo model is not for."""
    made = save_embedder(folder / "embeds"), save_cross_encoder(folder / "scores")
    return [flag for path in (*made, save_speech_model("whisper", folder)) for flag in ("--also", str(path))]


def memory(server: Server) -> str:
    return f"server {resident(server.pid) / 2**20:.0f} MiB, engine {resident(server.engine) / 2**20:.0f} MiB"


def restarts(server: Server) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("warmturn_engine_restarts_total"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    count = parser.parse_args().requests
    with (
        tempfile.TemporaryDirectory() as folder,
        serving("", Path(folder) / "data", *FLAGS, *others(Path(folder))) as server,
    ):
        for model in httpx.get(f"{server.url}/v1/models").json()["data"]:
            httpx.post(f"{server.url}/v1/models/{model['id']}/load", timeout=600).raise_for_status()
        run(server, 200)  # what is loaded once is loaded now
        before, died, began = memory(server), restarts(server), time.perf_counter()
        tally = run(server, count)
        seconds = time.perf_counter() - began
        if restarts(server) != died:  # what a request unloads does not die
            tally.failures.append("an engine died")
            print(tally.failures[-1])
        print(f"{tally.total} requests in {seconds:.0f} s, the slowest {tally.slowest:.2f} s")
        print(f"answers: {dict(sorted(tally.statuses.items()))}")
        print(f"memory before: {before}; after: {memory(server)}")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
