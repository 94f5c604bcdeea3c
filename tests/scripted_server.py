"""`warmturn` in a process of its own, with the engine of ``scripted_engine``: a key's tenant is its turns' script."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from warm_processes import Forked, start_scripted, usable

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 60.0  # seconds until a server that does not start fails its test

SERVE = """
import sys, scripted_engine
from server.__main__ import main
import server.instance, server.serve
# What must not hold the exit holds it for longer than a test waits.
server.serve.HTTP_SECONDS *= 100; server.instance.HTTP_SECONDS *= 100
sys.exit(main(sys.argv[1:], scripted_engine.COMMAND))
"""


def environment() -> dict[str, str]:
    """Ours without warmturn's variables, offline, and with the tests' modules importable."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WARMTURN_")}
    return {**kept, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def warmturn(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the program to its end."""
    command = (sys.executable, "-P", "-c", SERVE, *arguments)
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False)


class Server:
    """A running `warmturn serve`, with what it printed."""

    def __init__(self, tmp_path: Path, *arguments: str, warm: bool = True) -> None:
        """``warm``: it may have imported its modules before, see ``warm_processes``."""
        self.log = tmp_path / "output"
        self.data = tmp_path / "data"
        given = [SERVE, "serve", "--port", "0", "--data-dir", str(self.data), *arguments]
        self.process: subprocess.Popen[bytes] | Forked
        with self.log.open("w") as output:
            if warm and usable(arguments):
                self.process = start_scripted(given, environment(), output)
            else:
                command = (sys.executable, "-P", "-c", *given)
                self.process = subprocess.Popen(command, env=environment(), stdout=output, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_for(self, pattern: str) -> str:
        """The first group of ``pattern``, once the server has printed it."""
        found = wait(lambda: re.search(pattern, self.output) or self.process.poll() is not None)
        assert isinstance(found, re.Match), self.output
        return str(found.group(1))

    def url(self) -> str:
        return self.wait_for(r"serving demo at (\S+) \(")

    def engine(self) -> Path:
        """The folder of the engine process in /proc, the only child."""
        (pid,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return Path("/proc", pid)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)


def wait(condition: Callable[[], object]) -> object:
    """The first true value of ``condition``."""
    until = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.02)
    return value


def gone(process: Path) -> bool:
    """Whether a process of /proc runs no more."""
    try:
        return "State:\tZ" in (process / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


@contextmanager
def serving(tmp_path: Path, *arguments: str, warm: bool = True) -> Iterator[Server]:
    server = Server(tmp_path, *arguments, warm=warm)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
