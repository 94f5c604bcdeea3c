"""Measures what it takes to serve: seconds until a model is ready, CPU seconds and memory of both processes.

    python -m tools.start_cost [MODEL] [--runs 3]

``own`` memory is what a process alone takes (its private pages); RSS also counts the files of libraries, which
processes share. Seconds depend on what else the machine does, CPU seconds hardly. Linux only.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.tables import table

TICKS = os.sysconf("SC_CLK_TCK")
READY = "serving "


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def memory(process: int) -> tuple[float, float]:
    """The RSS and the private memory of a process, in MB."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(kilobytes) / 1024 for name, kilobytes, _ in (line.split() for line in lines)}
    return sizes["Rss:"], sizes["Private_Clean:"] + sizes["Private_Dirty:"]


def children(process: int) -> list[int]:
    """The processes that a process has started."""
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def measure(model: list[str], folder: str) -> list[str]:
    """Serve a model until it is ready; a row of the table."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "server", "serve", *model, "--port", "0", "--data-dir", folder]
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as made:
        assert made.stdout is not None
        if not any(READY in line for line in made.stdout):
            raise SystemExit("the server did not start")
        seconds = time.perf_counter() - began
        (engine,) = children(made.pid)
        rows = [f"{seconds:.2f}"]
        for process in (made.pid, engine):
            whole, own = memory(process)
            rows += [f"{cpu_seconds(process):.2f}", f"{whole:.0f}", f"{own:.0f}"]
        made.send_signal(signal.SIGTERM)
        made.stdout.read()
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="*", help="as for `warmturn serve`; the demo model by default")
    parser.add_argument("--runs", type=int, default=3, help="the first one may have to compile modules")
    asked = parser.parse_args(arguments)
    rows = []
    for _ in range(asked.runs):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(asked.model, folder))
    print(table("ready, s | server: CPU s | RSS, MB | own, MB | engine: CPU s | RSS, MB | own, MB", rows))


if __name__ == "__main__":
    main()
