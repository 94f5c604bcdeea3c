"""strace on the one thread of a process that touches the data folder: counts its calls, or kills at one of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections import Counter
from pathlib import Path

# What changes files. Not every one of them is used by every process.
CALLS = (
    "write pwrite64 writev pwritev fsync fdatasync rename renameat renameat2 unlink unlinkat ftruncate mkdir mkdirat"
).split()
ATTACHED = 10.0  # seconds


def usable() -> bool:
    """Whether strace is installed and may attach to a process that it did not start."""
    if shutil.which("strace") is None:
        return False
    sleeper = subprocess.Popen(["sleep", "5"])
    try:
        with Tracer(sleeper.pid, ["-e", "trace=write"]) as tracer:
            return tracer.attached()
    finally:
        sleeper.kill()
        sleeper.wait()


class Tracer:
    """strace with ``options`` on one thread, or with -f among them on all threads of a process."""

    def __init__(self, thread: int, options: list[str]) -> None:
        self._thread = thread
        self._strace = subprocess.Popen(
            ["strace", "-qq", *options, "-p", str(thread)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def __enter__(self) -> Tracer:
        return self

    def __exit__(self, *_: object) -> None:
        self._strace.terminate()
        self._strace.wait()

    def attached(self) -> bool:
        """Wait until it is there; False where it may not be."""
        deadline = time.monotonic() + ATTACHED
        while time.monotonic() < deadline and self._strace.poll() is None:
            status = Path(f"/proc/{self._thread}/status").read_text()
            if f"TracerPid:\t{self._strace.pid}\n" in status:
                return True
            time.sleep(0.01)
        return False


class StorageThread:
    """The thread of a process that changes files under ``data``, found while it does."""

    def __init__(self, pid: int, data: Path, log: Path) -> None:
        self._data = data
        self._log = log
        self._tracer = Tracer(pid, ["-f", "-y", "-e", "trace=" + ",".join(CALLS), "-o", str(log)])

    def __enter__(self) -> StorageThread:
        assert self._tracer.attached()
        return self

    def __exit__(self, *_: object) -> None:
        self._tracer.__exit__()

    def found(self) -> tuple[int, Counter[str]]:
        """It, and its calls by name, after the block."""
        calls: dict[int, Counter[str]] = {}
        for line in self._log.read_text(errors="replace").splitlines():
            call = re.match(r"(\d+) +(\w+)\(", line)
            if call and str(self._data) in line:
                calls.setdefault(int(call[1]), Counter())[call[2]] += 1
        assert len(calls) == 1, f"not one storage thread but {len(calls)}"
        ((thread, counts),) = calls.items()
        return thread, counts


def kill_at(thread: int, call: str, number: int) -> Tracer:
    """kill -9 of the process when its thread enters this call for the ``number``-th time from now on."""
    inject = f"inject={call}:signal=KILL:when={number}"
    tracer = Tracer(thread, ["-e", f"trace={call}", "-e", inject, "-o", "/dev/null"])
    assert tracer.attached()
    return tracer
