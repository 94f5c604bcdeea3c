"""CPU time, memory and output of a server's processes on this machine (Linux; elsewhere most values are unknown)."""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import IO

PROC = Path("/proc")
LISTENING = "0A"  # as /proc/net/tcp has it


def cpu_seconds(pid: int | None) -> float | None:
    """CPU seconds that a process and its live descendants have used, from the scheduler's nanosecond counters; None
    without a pid.
    """
    if pid is None:
        return None
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in PROC.glob("[0-9]*/stat"):
        with suppress(OSError):
            children[int(entry.read_text().rsplit(")", 1)[1].split()[1])].append(int(entry.parent.name))
    todo, total = [pid], 0.0
    while todo:
        one = todo.pop()
        todo += children[one]
        for task in PROC.glob(f"{one}/task/*/schedstat"):
            with suppress(OSError):
                total += int(task.read_text().split()[0]) / 1e9
    return total


def resident(pid: int) -> int:
    """Private memory of a process in bytes, swapped or not; 0 if unknown."""
    with suppress(OSError):
        lines = (PROC / str(pid) / "status").read_text().splitlines()
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "VmSwap:")))
    return 0


def last_line(said: IO[bytes]) -> str:
    """The last line that a process has printed to a file."""
    said.seek(0)
    return (said.read().decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]


def listener(port: int) -> int | None:
    """The pid of the process that listens on a TCP port of this machine; None if it is not visible."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            rows = [line.split() for line in (PROC / "net" / table).read_text().splitlines()[1:]]
            sockets |= {f"socket:[{row[9]}]" for row in rows if row[3] == LISTENING and int(row[1][-4:], 16) == port}
    pids = []
    for link in PROC.glob("[0-9]*/fd/*") if sockets else ():
        with suppress(OSError):
            if os.readlink(link) in sockets:
                pids.append(int(link.parts[2]))
    return min(pids, default=None)  # children inherit sockets; the first has the tree
