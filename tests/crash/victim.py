"""A server that is killed and started again on the same data folder."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from server_process import ServerProcess, alive, free_port

EXACT = ("--dtype", "float32")  # bfloat16's near ties fall otherwise where a turn is computed in other pieces
FLAGS = (*EXACT, "--kv-memory", "12M")  # of the demo model's KV about four long sessions
GONE = 30.0  # seconds after which an engine must have noticed that its server is dead


class Victim:
    """``warmturn serve`` on one port and one data folder, through any number of deaths. A context manager."""

    def __init__(self, data: Path, *flags: str) -> None:
        self.data = data
        self.deaths = 0
        self._flags = flags or FLAGS
        self._port = free_port()
        self.process = self._started()

    @property
    def url(self) -> str:
        return self.process.url

    def __enter__(self) -> Victim:
        self.wait_healthy()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.__exit__()

    def wait_healthy(self) -> None:
        """Until it takes turns; fails with its output if it ended by itself."""
        self.process.wait_healthy()

    def kill_engine(self) -> None:
        """kill -9 of the engine process, if there is one just now; the server starts another by itself."""
        for engine in self.process.engine_pids():
            os.kill(engine, signal.SIGKILL)
            self.deaths += 1

    def kill_server(self) -> None:
        """kill -9 of the server process; its engine must end by itself."""
        engines = self.process.engine_pids()
        self.process.process.kill()
        self.process.__exit__()
        self.deaths += 1
        deadline = time.monotonic() + GONE
        for engine in engines:
            while alive(engine):
                assert time.monotonic() < deadline, "an engine outlives its server"
                time.sleep(0.02)

    def revive(self) -> None:
        """Start it again if it is dead."""
        if self.process.process.poll() is not None:
            self.process.__exit__()
            self.start()

    def start(self) -> None:
        """Start it again; it need not be healthy yet."""
        self.process = self._started()

    def stop(self) -> None:
        """A clean end."""
        assert self.process.stop() == 0, self.process.log_path.read_text()
        self.process.__exit__()

    def _started(self) -> ServerProcess:
        return ServerProcess(None, self.data, *self._flags, port=self._port)
