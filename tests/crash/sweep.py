"""kill -9 at chosen calls that change a file, in one fixed piece of work."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import httpx
from crash.tracer import StorageThread, kill_at
from crash.victim import Victim
from crash.wire import Outcome
from crash.workload import allowed, goes_on, held, states, turn, work
from server_process import alive

IDLE = 10.0  # seconds in which what is written behind is on disk


def pid_of(victim: Victim, process: str) -> int:
    return victim.process.process.pid if process == "server" else victim.process.engine_pid()


def settle(victim: Victim) -> None:
    """Wait until everything is written behind, or the server or its engine is gone. After each step of the work, so
    that a slow disk does not write two turns at once, and each run makes the same calls.
    """
    deadline = time.monotonic() + IDLE
    while time.monotonic() < deadline:
        try:
            if victim.process.metric("warmturn_disk_pending_sessions") == 0:
                return
            if httpx.get(victim.url + "/health").status_code != 200:
                return
        except httpx.TransportError:
            return
        time.sleep(0.05)


def storage_thread(victim: Victim, process: str, log: Path, suffix: str | None = None) -> tuple[int, Counter[str]]:
    """The storage thread, and what it calls in the whole work on sessions of a ``suffix``, or in one turn."""
    settle(victim)
    with StorageThread(pid_of(victim, process), victim.data, log) as thread:
        if suffix is not None:
            assert work(victim.url, suffix, lambda: settle(victim)).last is None
        else:
            assert turn("a", "Hello.")(victim.url, f"-warm-{pid_of(victim, process)}") is Outcome.ACKNOWLEDGED
        settle(victim)
        time.sleep(0.5)  # deleted files go a little later
    return thread.found()


class Sweep:
    """The crash points of one process, ``server`` or ``engine``; ``reference`` is the URL of a server that lives."""

    def __init__(self, victim: Victim, reference: str, process: str, log: Path) -> None:
        self._victim = victim
        self._reference = reference
        self._process = process
        self._log = log
        self._expected = states(reference, f"-{process}")
        self.wrong: list[str] = []
        self.missed = 0
        self.kills = 0

    def run(self, every: int) -> None:
        """All points. The last ones may not come: how much is written together varies a little."""
        storage_thread(self._victim, self._process, self._log, "-first")
        # Counted the second time: from then on the same words share what is stored of them.
        counts = storage_thread(self._victim, self._process, self._log, "-second")[1]
        print(f"{self._process}: {dict(counts)}", flush=True)
        for call, count in counts.items():
            for number in range(1, count + 1, every):
                self.point(call, number)
            print(f"{self._process} {call}: {self.kills} kills so far, {self.missed} not reached", flush=True)

    def point(self, call: str, number: int) -> None:
        victim, suffix = self._victim, f"-{self._process}-{call}-{number}"
        pid = pid_of(victim, self._process)
        thread = storage_thread(victim, self._process, self._log)[0]
        with kill_at(thread, call, number):
            progress = work(victim.url, suffix, lambda: settle(victim))
            settle(victim)
            time.sleep(0.2)
        if alive(pid):
            self.missed += 1
            return
        self.kills += 1
        victim.revive()
        victim.wait_healthy()
        found = held(victim.url, suffix)
        problem: str | None = f"it holds {found}"
        if found in allowed(progress, self._expected):
            problem = goes_on(victim.url, suffix, found, self._reference)
        if problem is not None:
            self.wrong.append(f"{self._process} {call} {number}, after {progress}: {problem}")
            print(self.wrong[-1], flush=True)
