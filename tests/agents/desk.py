"""A server with a scripted model behind a recording proxy, and a client's home and project in temporary folders."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from agents.agent import MODEL
from agents.proxy import Exchange, Proxy
from agents.script import Script
from agents.tiny_llama import ROOT, save_tiny_llama
from server_process import free_port

START = 180.0  # seconds until a server that does not start fails its test
RUN = 240.0  # seconds until a client that hangs fails its test
FLAGS = ("--kv-memory", "256M", "--disk-space", "1G", "--served-model-name", MODEL)


def more_flags() -> list[str]:
    """Flags of the server that whoever runs the tests asks for: ``AGENTS_FLAGS="--prompt-rules none"``."""
    return shlex.split(os.environ.get("AGENTS_FLAGS", ""))


@dataclass
class Desk:
    """What a client's test has: a server, a proxy, a home folder and a project."""

    folder: Path
    proxy: Proxy
    environment: dict[str, str] = field(default_factory=dict)
    printed: list[str] = field(default_factory=list)

    @property
    def project(self) -> Path:
        """The folder that the client works in."""
        return self.folder / "project"

    @property
    def home(self) -> Path:
        """Its home folder."""
        return self.folder / "home"

    @property
    def exchanges(self) -> list[Exchange]:
        """Every request so far."""
        return self.proxy.exchanges

    def say(self, script: Script) -> None:
        """The model follows ``script`` from now on."""
        script.write(self.folder / "script.json")

    def run(self, *command: str | Path) -> str:
        """Run a client to its end; what it printed."""
        process = self.start(*command)
        try:
            out, _ = process.communicate(timeout=RUN)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
            raise AssertionError(f"{command[0]} hung: {out[-4000:]}") from None
        self.printed.append(out)
        assert process.returncode == 0, f"{command} ended with {process.returncode}: {out[-4000:]}"
        return out

    def interrupt(self, *command: str | Path, when: Callable[[], bool]) -> str:
        """Run a client and send it SIGINT, as Ctrl-C does, once ``when`` is true; what it printed."""
        process = self.start(*command)
        until = time.monotonic() + RUN
        while not when():
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                raise AssertionError(f"{command[0]} was not to be interrupted: {process.communicate()[0][-4000:]}")
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        try:
            out, _ = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
        self.printed.append(out)
        return out

    def start(self, *command: str | Path) -> subprocess.Popen[str]:
        """A client in its project, with an environment in which nothing of this machine's user is seen."""
        given = {"PATH": os.environ["PATH"], "HOME": str(self.home), "LANG": "C.UTF-8", "TERM": "dumb", "TZ": "UTC"}
        given |= {"NO_PROXY": "127.0.0.1,localhost", "GIT_CONFIG_NOSYSTEM": "1", "CI": "1"}
        return subprocess.Popen(
            [str(part) for part in command],
            cwd=self.project,
            env=given | self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def replying(self) -> bool:
        """Whether the server is in the middle of a reply."""
        return any(exchange.first_token is not None and not exchange.ended for exchange in self.exchanges)


class ScriptedServer:
    """The server alone; a context manager. ``restart`` keeps its data."""

    def __init__(self, folder: Path, template: str, *flags: str) -> None:
        self.folder = folder
        self.flags = flags
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        self.model = save_tiny_llama(folder / template, template)
        Script().write(folder / "script.json")

    def __enter__(self) -> ScriptedServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Until it is healthy."""
        command = [sys.executable, "-m", "agents.scripted_server", self.model, self.folder / "script.json"]
        command += ["--port", str(self.port), "--data-dir", self.folder / "data", *FLAGS, *self.flags, *more_flags()]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("WARMTURN_")}
        kept |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([str(part) for part in command], env=kept, stdout=log, stderr=log)
        until = time.monotonic() + START
        while True:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < until, "the server does not start"
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)

    def stop(self) -> None:
        """SIGTERM, and its end."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def restart(self) -> None:
        """Another process over the same data."""
        self.stop()
        self.start()


@contextmanager
def desk(folder: Path, template: str = "chatml", *flags: str) -> Iterator[tuple[Desk, ScriptedServer]]:
    """A desk in an empty folder, with a server of its own."""
    for name in ("home", "project", "data"):
        (folder / name).mkdir()
    with ScriptedServer(folder, template, *flags) as server, Proxy(server.url) as proxy:
        yield Desk(folder, proxy), server
