"""`warmturn cluster` in a process of its own, and all of Ray's processes that belong to it."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import closing, suppress
from pathlib import Path

from server_process import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
START = 300.0  # seconds that a start may take on a busy machine
MARK = "TEST_CLUSTER_OF_WARMTURN"
KEY = "key-of-the-test-cluster"


class RayCluster:
    """Replicas of the demo model on this machine. A context manager, after which none of its processes is left."""

    def __init__(self, folder: Path, replicas: int) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.data = folder / "data"
        self.data.mkdir()
        self.database = self.data / "log.sqlite"
        self._mark = uuid.uuid4().hex
        self._ray = Path(tempfile.mkdtemp(prefix="ray-"))  # short: the path of a socket has 107 bytes
        self._output = folder / "output"
        flags = ["--data-dir", str(self.data), "--port", str(self.port), "--served-model-name", "m"]
        self._flags = [*flags, "--dtype", "float32", "--kv-memory", "12M", "--replica-cpus", "0.1"]
        self._shared = {"database": f"sqlite:///{self.database}", "remote": f"file://{self.data}/remote"}
        self._shared["api-key"] = f"default={KEY}"
        with self._output.open("wb") as output:
            secrets = [f"--{name}={value}" for name, value in self._shared.items()]
            command = [*self._command(replicas), *secrets]
            self._process = subprocess.Popen(command, env=self._environment(), stdout=output, stderr=output)

    def __enter__(self) -> RayCluster:
        deadline = time.monotonic() + START
        while b"warmturn: serving" not in self._output.read_bytes():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.end()
                raise AssertionError(f"it does not start: {self.output}")
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def scale(self, replicas: int) -> None:
        """Run the command once more, with another number; it ends when there are so many."""
        command = [*self._command(replicas), "--ray-address", "auto"]
        shared = {f"WARMTURN_{name.upper().replace('-', '_')}": value for name, value in self._shared.items()}
        there = {**self._environment(), **shared}
        ran = subprocess.run(command, env=there, capture_output=True, timeout=START, check=False)
        assert ran.returncode == 0, ran.stderr.decode()

    def written(self) -> dict[Path, bytes]:
        """What Ray wrote: its logs and the rest of its folder, and what its processes printed."""
        files = [path for path in self._ray.rglob("*") if path.is_file() and not path.is_symlink()]
        return {path: path.read_bytes() for path in [*files, self._output]}

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self._process.terminate()
        return self._process.wait(START)

    def end(self) -> None:
        """Stop it, and kill whatever of it is left."""
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
        for pid in self.processes():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        shutil.rmtree(self._ray, ignore_errors=True)

    def processes(self) -> list[int]:
        """All that were started by it, by the mark in their environment."""
        mark = f"{MARK}={self._mark}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (folder / "environ").read_bytes() and int(folder.name) != os.getpid():
                    found.append(int(folder.name))
        return found

    def replicas(self) -> dict[str, int]:
        """The process of each replica, by the name that its server has in the log."""
        found = {}
        locks = {os.path.realpath(lock): lock.parent for lock in self.data.glob("replica-*/lock")}
        for pid in self.processes():
            with suppress(OSError):
                for link in Path(f"/proc/{pid}/fd").iterdir():
                    with suppress(OSError):
                        folder = locks.get(os.readlink(link))
                        if folder is not None:
                            found[(folder / "server").read_text()] = pid
        return found

    def holder(self, session: str) -> str | None:
        """The name of the server that holds a session now."""
        with closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True, timeout=30)) as connection:
            query = "SELECT server FROM leases WHERE name = ?"
            row = connection.execute(query, (f"default/{session}",)).fetchone()
        return None if row is None else str(row[0])

    def wait_for_replicas(self, count: int) -> None:
        """Until there are so many, ready or not."""
        deadline = time.monotonic() + START
        while len(self.replicas()) != count:
            assert time.monotonic() < deadline, self.output
            time.sleep(0.2)

    def _command(self, replicas: int) -> list[str]:
        return [sys.executable, "-P", "-m", "server", "cluster", "--replicas", str(replicas), *self._flags]

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("WARMTURN_", "RAY_"))}
        ours = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", MARK: self._mark}
        return {**kept, **ours, "RAY_TMPDIR": str(self._ray)}
