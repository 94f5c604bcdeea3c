"""A real server, started as users start it, for tests from the outside."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
from warm_processes import Forked, engines_of, start_server, usable

START = 120.0  # seconds that a start may take on a busy machine


class ServerProcess:
    """``warmturn serve`` in a process of its own; a context manager that stops it. ``warm``: it and its engines
    may have imported their modules before, see ``warm_processes``.
    """

    def __init__(self, model: Path | None, data: Path, *flags: str, port: int | None = None, warm: bool = True) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        python = os.environ.get("SERVER_PYTHON", sys.executable)  # clients may live elsewhere
        arguments = ["serve", *([str(model)] if model else []), "--port", str(self.port), "--data-dir", str(data)]
        arguments += ["--served-model-name", "m", *flags]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("WARMTURN_")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
        self._log = (data / f"server-{self.port}.log").open("wb")
        self.log_path = Path(self._log.name)
        self.process: subprocess.Popen[bytes] | Forked
        if warm and usable(flags):
            self.process = start_server(arguments, environment, self._log)
        else:
            command = [python, "-m", "server", *arguments]
            self.process = subprocess.Popen(command, env=environment, stderr=self._log, stdout=self._log)

    def __enter__(self) -> ServerProcess:
        self.wait_healthy()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._log.close()

    def wait_healthy(self) -> None:
        """Until ``/health`` is 200; fails with the server's output if it ends."""
        deadline = time.monotonic() + START
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended: {self.log_path.read_text()}")
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"not healthy after {START} s: {self.log_path.read_text()}")

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def engine_pid(self) -> int:
        """The pid of the engine process."""
        engines = self.engine_pids()
        assert len(engines) == 1, engines
        return engines[0]

    def engine_pids(self) -> list[int]:
        """The pids of all engine processes that there are just now."""
        pid = self.process.pid
        if isinstance(self.process, Forked):
            return engines_of(pid)
        try:
            children = [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
            return [one for one in children if b"scheduler" in Path(f"/proc/{one}/cmdline").read_bytes()]
        except OSError:
            return []  # it went away meanwhile

    @contextmanager
    def slowed(self) -> Iterator[None]:
        """Within it the engine runs for a tenth of the time, until it ends."""
        engine, ended = self.engine_pid(), Event()

        def hold() -> None:
            with suppress(ProcessLookupError):
                while not ended.wait(0.005):
                    os.kill(engine, signal.SIGSTOP)
                    ended.wait(0.045)
                    os.kill(engine, signal.SIGCONT)

        holding = Thread(target=hold)
        holding.start()
        try:
            yield
        finally:
            ended.set()
            holding.join()

    def forget_sessions(self, key: str | None = None) -> None:
        """Delete all sessions (of a key), also those whose turns are still running."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        with httpx.Client(base_url=self.url, timeout=60, headers=headers) as client:
            while found := client.get("/v1/sessions", params={"limit": 100}).json()["data"]:
                for one in found:
                    client.delete(f"/v1/sessions/{one['id']}").raise_for_status()

    def metric(self, name: str, **labels: str) -> float:
        """One value of ``/metrics``."""
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
            if match and all(f'{k}="{v}"' in (match[1] or "") for k, v in labels.items()):
                return float(match[2])
        raise AssertionError(f"no metric {name}")

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        """One request, the answer whatever it is."""
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=120)

    def answer(self, path: str, body: dict[str, Any], **headers: str) -> Any:
        """The answer to a request that succeeds."""
        response = self.post(path, body, **headers)
        assert response.status_code == 200, response.text
        return response.json()


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
