"""Two real servers that share log and remote tier, and a real nginx in front of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
from crash.victim import EXACT
from server_process import START, ServerProcess, free_port

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE = 120.0  # seconds for an answer
TOLD = ({"role": "user", "content": "My secret code is 4821."},)
ASKED = ({"role": "user", "content": "What is the code?"},)
ANSWER = "The code is 4821."


@contextmanager
def servers(folder: Path, database: str, count: int = 2) -> Iterator[list[ServerProcess]]:
    """Servers of the demo model on one database; all of them are gone afterwards."""
    with ExitStack() as stack:
        started = []
        for number in range(count):
            data = folder / f"replica-{number}"
            data.mkdir()
            flags = (*EXACT, "--kv-memory", "12M", "--database", database, "--remote", f"file://{folder}/remote")
            server = ServerProcess(None, data, *flags)
            stack.push(server.__exit__)
            started.append(server)
        for server in started:
            server.wait_healthy()
        yield started


class HasPort(Protocol):
    port: int


class Nginx:
    """The configuration of ``deploy/nginx.conf`` on a free port, over some servers. A context manager.

    ``names``: the port of a name server on 127.0.0.1 that knows where replica-1 and replica-2 are, at the ports of the
    servers; without it they are at 127.0.0.1, and no names are looked up.
    """

    def __init__(self, folder: Path, over: Sequence[HasPort], names: int | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        folder.mkdir()
        text = (ROOT / "deploy" / "nginx.conf").read_text()
        for number, server in enumerate(over, 1):
            assert f"replica-{number}:8000 max_fails=0 resolve;" in text
            host = "127.0.0.1" if names is None else f"replica-{number}"
            text = text.replace(f"replica-{number}:8000", f"{host}:{server.port}")
        if names is None:
            text = re.sub(r"^ *resolver.*\n", "", text, flags=re.MULTILINE).replace(" resolve;", ";")
        text = text.replace("resolver 127.0.0.11 valid=5s", f"resolver 127.0.0.1:{names} valid=1s")
        text = text.replace("listen 8000", f"listen 127.0.0.1:{self.port}").replace("/tmp/", f"{folder}/")
        text = text.replace("/dev/stdout", f"{folder}/access.log").replace("processes auto", "processes 2")
        if os.geteuid() == 0:
            text = f"user root;\n{text}"  # the tests' folders are root's
        self._file = folder / "nginx.conf"
        self._file.write_text(text)
        self._folder = folder
        self._command = [installed(), "-p", str(folder), "-c", str(self._file), "-e", str(folder / "error.log")]

    def __enter__(self) -> Nginx:
        checked = subprocess.run([*self._command, "-t"], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr
        self._process = subprocess.Popen([*self._command, "-g", "daemon off;"])
        deadline = time.monotonic() + START
        while True:
            try:
                httpx.get(f"{self.url}/metrics")
                return self
            except httpx.TransportError:
                assert time.monotonic() < deadline, (self._folder / "error.log").read_text()
                time.sleep(0.02)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)

    def lines(self) -> list[str]:
        return (self._folder / "access.log").read_text().splitlines()


def looks_names_up() -> bool:
    """Whether the installed nginx looks the names of servers up again."""
    if not installed():
        return False
    told = subprocess.run([installed(), "-v"], capture_output=True, text=True, check=True).stderr
    return tuple(map(int, told.rpartition("nginx/")[2].split()[0].split("."))) >= (1, 27, 3)


def installed() -> str:
    found = shutil.which("nginx", path=os.environ.get("PATH", "") + os.pathsep + "/usr/sbin")
    return found or ""


@dataclass
class Ended:
    """A stream as its client saw it. ``finished``: it came to its last event. ``error``: code of the one that it ended
    with. Neither: it was cut."""

    text: str = ""
    finished: bool = False
    error: str | None = None
    status: int = 0
    server: int | None = None
    session: str = ""
    usage: dict[str, Any] = field(default_factory=dict)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def body_of(messages: Sequence[dict[str, str]], **more: Any) -> dict[str, Any]:
    return {"messages": [*messages], "temperature": 0, "max_tokens": 40, **more}


def ask(
    url: str, session: str, messages: Sequence[dict[str, str]], client: httpx.Client | None = None, **headers: str
) -> httpx.Response:
    """What is new in a session; the answer whatever it is."""
    send = httpx.post if client is None else client.post
    return send(
        f"{url}/v1/sessions/{session}/chat/completions",
        json=body_of(messages),
        headers={name.replace("_", "-"): value for name, value in headers.items()},
        timeout=PATIENCE,
    )


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


def stream(url: str, session: str, tokens: int, ended: Ended, **headers: str) -> Ended:
    """A turn of so many tokens, read to its end into ``ended``, also while it still comes."""
    ended.session = session
    body = body_of(TOLD, stream=True, ignore_eos=True, max_tokens=tokens, min_tokens=tokens)
    try:
        with httpx.stream(
            "POST", f"{url}/v1/sessions/{session}/chat/completions", json=body, headers=headers, timeout=PATIENCE
        ) as answer:
            ended.status = answer.status_code
            if answer.status_code != 200:
                ended.error = json.loads(answer.read())["error"]["code"]
                return ended
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    ended.finished = ended.error is None
                elif line.startswith("data: "):
                    read_event(json.loads(line.removeprefix("data: ")), ended)
    except httpx.TransportError:
        pass
    return ended


def read_event(event: dict[str, Any], ended: Ended) -> None:
    if "error" in event:
        ended.error = event["error"]["code"]
        return
    for choice in event["choices"]:
        ended.text += choice["delta"].get("content") or ""
    ended.usage = event.get("usage") or ended.usage
