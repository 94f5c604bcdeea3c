"""Servers and engines that have imported their modules already: copies of a process of each kind that waits with them.

Most of the start of a server is the import of the same modules each time; torch and transformers in its engine. Here
one process of each kind imports them, for all tests of a process of pytest, and copies of these two (``os.fork``) are
servers and their engines. Those are not each other's children, but a server waits for its engine as if it were.

A request is a JSON object with ``kind``, ``arguments`` and ``environment``, and file descriptors: standard input, where
to print, a socket that is told the pid, and at its end the exit status, and what is for the process itself. Run as a
script with the name of what to import, and with the socket of the requests as standard input.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
MOST = 1 << 20  # bytes of a request
OTHERS = ("--tensor-parallel", "--offline", "--log-format")  # these decide what an engine imports
READ = ("HF_", "OTEL_")  # variables of the environment that imports read
USABLE = sys.platform == "linux" and "SERVER_PYTHON" not in os.environ and not Path("/dev/nvidiactl").exists()


class Forked:
    """A process that was started by another one: what ``subprocess.Popen`` has of it."""

    def __init__(self, told: socket.socket, pid: int, stdin: IO[bytes] | None = None) -> None:
        self._told = told
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        try:
            return self._status(0.0)
        except BlockingIOError:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once it has ended. Raises TimeoutExpired."""
        try:
            return self._status(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired("a copy", timeout or 0.0) from None

    def communicate(self) -> None:
        if self.stdin is not None:
            self.stdin.close()
        self.wait()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _status(self, timeout: float | None) -> int:
        if self.returncode is None:
            self._told.settimeout(timeout)
            self.returncode = int(self._told.recv(64))
            self._told.close()
        return self.returncode


def usable(flags: Sequence[str]) -> bool:
    """Whether copies are what a server with these flags and its engine would be, in the environment of now."""
    return USABLE and not {flag.partition("=")[0] for flag in flags}.intersection(OTHERS) and _read() == _read_first()


def _read() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(READ)}


@cache
def _read_first() -> dict[str, str]:
    """What the first server had: modules that tests import may have changed it before."""
    return _read()


def start_server(arguments: list[str], environment: dict[str, str], output: IO[bytes]) -> Forked:
    """``warmturn`` with these arguments."""
    with open(os.devnull) as nothing:
        files = [nothing.fileno(), output.fileno(), starter("scheduler").requests.fileno()]
        return starter("server").start("server", arguments, environment, files)


def start_scripted(arguments: list[str], environment: dict[str, str], output: IO[str]) -> Forked:
    """A script that runs ``warmturn`` in its own way, and its arguments."""
    with open(os.devnull) as nothing:
        return starter("server").start("scripted", arguments, environment, [nothing.fileno(), output.fileno()])


def engines_of(server: int) -> list[int]:
    """The pids of the engines that run for a server with this pid."""
    pid, found = starter("scheduler").pid, []
    for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(OSError):  # it went away meanwhile
            state, name = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[0], comm(server)
            if state not in "ZX" and Path(f"/proc/{one}/comm").read_text().strip() == name:
                found.append(int(one))
    return found


def comm(server: int) -> str:
    """What the system calls an engine of a server."""
    return f"of {server}"


class Starter:
    """The process that starts others, as one sees it who asks it."""

    def __init__(self, requests: socket.socket, pid: int = 0) -> None:
        self.requests = requests
        self.pid = pid

    def start(
        self, kind: str, arguments: list[str], environment: dict[str, str], files: list[int], stdin: Any = None
    ) -> Forked:
        told, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = json.dumps({"kind": kind, "arguments": arguments, "environment": environment}).encode()
        with theirs:
            socket.send_fds(self.requests, [request], [*files[:2], theirs.fileno(), *files[2:]])
        return Forked(told, int(told.recv(64)), stdin)


@cache
def starter(imports: str) -> Starter:
    """The only one of this process that has imported that."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "3000", "PYTHONPATH": str(ROOT)}
    with theirs:
        process = subprocess.Popen([sys.executable, "-P", __file__, imports], env=environment, stdin=theirs.fileno())

    def end() -> None:
        ours.close()
        with suppress(subprocess.TimeoutExpired):  # a server that is left over could ask for an engine
            process.wait(10)
        process.kill()
        process.wait()

    atexit.register(end)
    return Starter(ours, process.pid)


def import_engine() -> None:
    """What ``scheduler.__main__`` imports for an engine on a CPU."""
    from scheduler.engine_config import EngineConfig
    from scheduler.engine_import_savings import callers_found_quickly, import_torch, leave_out_unused

    gc.disable()
    import_torch()
    leave_out_unused(EngineConfig(address="", model="", device="cpu"))
    with callers_found_quickly():
        from scheduler import process  # noqa: F401


def be_engine(arguments: list[str], _: list[int]) -> None:
    """What ``python -m scheduler`` does. In a session of its own, as ``EngineLauncher`` has it."""
    from scheduler.__main__ import run

    Path("/proc/self/comm").write_text(arguments[0])
    os.setsid()
    run()


def import_server() -> None:
    """What ``warmturn serve`` imports."""
    import server.commands
    from server.instance import import_app, import_parts
    from server.server_import_savings import leave_out_unused
    from server.torchless import without_torch

    leave_out_unused()
    import server.serve  # noqa: F401

    without_torch()
    gc.disable()
    import_parts()
    import_app()


def be_server(arguments: list[str], files: list[int]) -> None:
    """What ``python -m server`` does, with engines of ``files[0]``."""
    from server.__main__ import main
    from server.engine.launcher import EngineLauncher, engine_environment

    engines = Starter(socket.socket(fileno=files[0]))

    def start(_: EngineLauncher, output: int) -> Any:
        reads, writes = os.pipe()
        try:
            stdin = os.fdopen(writes, "wb")
            return engines.start("engine", [comm(os.getpid())], engine_environment(), [reads, output], stdin)
        finally:
            os.close(reads)

    EngineLauncher._start = start  # type: ignore[assignment,method-assign]
    sys.exit(main(arguments))


def be_scripted_server(arguments: list[str], _: list[int]) -> None:
    """What ``scripted_server.SERVE`` does."""
    sys.path.insert(1, str(ROOT / "tests"))
    script, *sys.argv[1:] = arguments
    exec(script, {"__name__": "__main__"})


IMPORTS = {"scheduler": import_engine, "server": import_server}
KINDS = {"engine": be_engine, "server": be_server, "scripted": be_scripted_server}


def set_environment(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


class Requests:
    """Takes requests until nobody can send any more, and waits for the processes."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._selector = DefaultSelector()
        self._selector.register(requests, EVENT_READ)

    def next(self) -> dict[str, Any] | None:
        """In a new process its request, with its own ``files``; None in this one, in the end."""
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._ended(key.fd, *key.data)
                    continue
                data, files, _, _ = socket.recv_fds(self._requests, MOST, 8)
                if not data:
                    return None
                if (pid := os.fork()) == 0:
                    return self._begin(json.loads(data), files)
                self._started(pid, files)

    def _started(self, pid: int, files: list[int]) -> None:
        told = socket.socket(fileno=files.pop(2))
        for file in files:
            os.close(file)
        told.send(str(pid).encode())
        self._selector.register(os.pidfd_open(pid), EVENT_READ, (pid, told))

    def _ended(self, handle: int, pid: int, told: socket.socket) -> None:
        self._selector.unregister(handle)
        os.close(handle)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with told, suppress(OSError):  # nobody waits for it
            told.send(str(status).encode())

    def _begin(self, request: dict[str, Any], files: list[int]) -> dict[str, Any]:
        """Nothing of the other processes stays here."""
        own = files[3:]
        for key in self._selector.get_map().values():  # their numbers will be those of other files
            if key.data is not None:
                key.data[1].detach()
        self._requests.detach()
        self._selector.close()
        for number, file in ((0, files[0]), (1, files[1]), (2, files[1])):
            os.dup2(file, number)
        for file in map(int, os.listdir("/proc/self/fd")):
            if file > 2 and file not in own:
                with suppress(OSError):  # the folder itself
                    os.close(file)
        return {**request, "files": own}


if __name__ == "__main__":
    IMPORTS[sys.argv[1]]()
    gc.freeze()
    request = Requests(socket.socket(fileno=os.dup(0))).next()
    if request is not None:
        set_environment(request["environment"])
        sys.argv = sys.argv[:1]
        KINDS[request["kind"]](request["arguments"], request["files"])
