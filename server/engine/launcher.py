"""``EngineLauncher``: starts engine processes, the first one before the server has imported its own modules."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ENGINE_COMMAND = (sys.executable, "-P", "-m", "scheduler")

LONGEST_BACKOFF = 30.0  # seconds
SECRETS = ("WARMTURN_API_KEY", "WARMTURN_DATABASE")  # of the server; the engine has no use for them


class EngineLauncher:
    """Starts processes of one command, each with its standard input as a pipe. They import their modules and wait there
    for a configuration; an engine exits when the pipe is closed.
    """

    def __init__(self, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._command = tuple(command)
        self._early: subprocess.Popen[bytes] | None = None

    def start_early(self) -> None:
        """Start the process that the next ``launch`` returns, so that it imports its modules meanwhile. Call
        ``discard`` when no ``launch`` may follow. Does nothing while there is one.
        """
        if self._early is not None:
            return
        with suppress(OSError):  # ``launch`` tries again, and its caller reports what fails
            self._early = self._start(2)

    def launch(self, output: int = 2) -> subprocess.Popen[bytes]:
        """A process of the command. What a new one prints goes to the file descriptor ``output``. Raises OSError."""
        process, self._early = self._early, None
        return process or self._start(output)

    def discard(self) -> None:
        """Kill the process of ``start_early`` unless ``launch`` has returned it."""
        process, self._early = self._early, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self, output: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=output,  # what a library prints belongs to the log, not to our output
            stderr=output,
            env=engine_environment(),
            start_new_session=True,  # Ctrl-C in the terminal is for the server, which then ends the engine
        )


def engine_environment() -> dict[str, str]:
    """The environment of the engine process: this one's without its secrets. In a source tree that is not installed,
    PYTHONPATH has the folder of ``scheduler`` (the command's -P keeps the working directory out of the imports). oneDNN
    and torch cache a kernel per matrix shape, and each step length is another shape: with the default limits of 1024
    the caches of a bfloat16 model on a CPU grow by 0.5 GB while it serves, so they are lowered. OpenMP threads spin for
    some ten microseconds instead of milliseconds: where cores are scarce, spinning took a third of them. The hub's
    library reports its final error only, which the server reports too.
    """
    root = Path(__file__).resolve().parents[2]
    ours = {name: value for name, value in os.environ.items() if name not in SECRETS}
    spin = {} if "OMP_WAIT_POLICY" in ours else {"GOMP_SPINCOUNT": "3000"}
    caches = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128"}
    environment = {"HF_HUB_VERBOSITY": "error", **caches, **spin, **ours}
    if root.name not in ("site-packages", "dist-packages"):
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{known}" if known else str(root)
    return environment


def backoff(deaths: int) -> float:
    """Seconds to wait before the next process: none after an accident, then 1, 2, 4... while they keep dying young."""
    return 0.0 if deaths <= 1 else min(LONGEST_BACKOFF, 2.0 ** min(deaths - 2, 5))
