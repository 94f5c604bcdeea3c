"""Simulation of retention: how many turns of coding agents find their KV, under the engine's policy and plain LRU.

    python -m tools.simulate_retention [--hours 4] [--every 40] [--seeds 3] [--over 1 2 4] [--pace 1] [--trace FILE]

The session store, its pages, its prefix index and ``Retention`` are the engine's own; the clock, the model and the disk
are simulated. A page stands for ``GRAIN`` tokens. Turns are computed one after the other at ``--prefill`` tokens a
second, and read one after the other from each tier; generation takes as long as the trace says. The device is so many
times smaller than what all conversations that go on hold at once at most; the host is ``--host`` times as large as the
device. Everything is on disk too, unless ``--disk 0``.
"""

from __future__ import annotations

import argparse
import heapq
import random
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import mean

import torch

from cache.memory.memory_tier import MemoryTier, PageShape
from cache.pages.pool import PagePool
from cache.pages.retention import Retention, Stop
from cache.pages.session import SessionCache
from cache.store import SessionStore
from cache.tier import StopKind
from tools.agent_traces import LONGEST, SYSTEM, TraceSession, draw, load
from tools.tables import table

GRAIN = 512  # tokens in a page
STARTS = ("warm", "loaded", "recomputed")  # how a turn that goes on finds what it goes on from


class LeastRecentlyUsed(Retention):
    """The baseline: all sessions are worth the same, so the least recently used one goes first."""

    def rate(self, stop: Stop | None, now: float) -> float:
        """The same for all."""
        return 0.0

    def is_late(self, stop: Stop | None, now: float) -> bool:
        """Never: nothing is moved ahead of need."""
        return False


@dataclass(frozen=True)
class Machine:
    """Sizes in pages and speeds: ``prefill`` tokens a second, ``token_bytes``, and bytes a second from host and
    disk. ``disk``: whether there is one, which has room for all.
    """

    device: int
    host: int
    disk: bool
    prefill: float
    token_bytes: int
    host_rate: float
    disk_rate: float


@dataclass
class Report:
    """What happened to the turns that came after the beginning."""

    starts: Counter[str] = field(default_factory=Counter)
    computed: int = 0  # tokens
    new: int = 0  # tokens that no earlier turn has had
    waits: list[float] = field(default_factory=list)  # seconds to the first token
    peak: int = 0  # pages that conversations hold at most that go on

    def share(self, start: str) -> float:
        """Of the turns that go on from another one."""
        return self.starts[start] / max(1, self.starts.total())

    def wait(self, share: float) -> float:
        """A quantile of the seconds to the first token."""
        return sorted(self.waits)[min(len(self.waits) - 1, int(share * len(self.waits)))]


class Conversation:
    """A session of the trace, as far as it has come."""

    def __init__(self, name: str, trace: TraceSession, tokens: Callable[[], int]) -> None:
        self.name = name
        self.trace = trace
        self.at = 0
        self.timeline: array[int] = array("i")
        self.session: SessionCache | None = None
        self.arrived = 0.0
        self._tokens = tokens

    def prompt(self) -> array[int]:
        """The timeline of the next turn, in pages."""
        turn = self.trace.turns[self.at]
        if self.at == 0:
            tenant = int("".join(filter(str.isdigit, self.trace.tenant)) or 0)
            shared = SYSTEM // GRAIN if turn.tokens > SYSTEM else 0
            ids = array("i", range(1 + 1000 * tenant, 1 + 1000 * tenant + shared))
            return ids + self.more(turn.tokens - shared * GRAIN)
        kept = len(self.timeline) if turn.kept is None else turn.kept // GRAIN
        return self.timeline[:kept] + self.more(turn.tokens)

    def more(self, tokens: int) -> array[int]:
        """Pages that no other conversation has."""
        return array("i", [self._tokens() for _ in range(max(1, round(tokens / GRAIN)))])


class Simulation:
    """One run of a trace on a machine."""

    def __init__(
        self, trace: Sequence[TraceSession], machine: Machine, retention: type[Retention], begin: float, end: float
    ) -> None:
        """Turns that come between ``begin`` and ``end`` (seconds) are reported."""
        self.now = 0.0
        self.report = Report()
        self._machine, self._begin, self._end = machine, begin, end
        shapes = {0: PageShape(1, 1, 1, 1, torch.int8)}
        cpu = torch.device("cpu")
        host = MemoryTier(machine.host, 1, cpu, shapes if machine.host else None)
        self._store = SessionStore(
            PagePool(MemoryTier(machine.device, 1, cpu, shapes), host), retention=retention(lambda: self.now)
        )
        fresh = count(1_000_000)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._waiting: deque[tuple[Conversation, array[int]]] = deque()
        self._free = Counter({"model": 0.0, "host": 0.0, "disk": 0.0})  # when each can begin the next work
        self._open: dict[str, int] = {}  # pages of conversations that go on
        self._held = 0
        for number, session in enumerate(trace):
            one = Conversation(f"c{number}", session, lambda: next(fresh))
            self._at(session.start, lambda one=one: self._arrive(one))  # type: ignore[misc]

    def run(self) -> Report:
        while self._events and self._events[0][0] < self._end:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self.report

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _work(self, unit: str, seconds: float) -> float:
        """When the work of a unit that does one thing after the other will be done."""
        self._free[unit] = max(self._free[unit], self.now) + seconds  # type: ignore[assignment]
        return self._free[unit]

    def _arrive(self, one: Conversation) -> None:
        one.arrived = self.now
        self._waiting.append((one, one.prompt()))
        self._admit()

    def _admit(self) -> None:
        """Admit turns in their order, as long as there is room."""
        self._store.residency.demote_late()
        while self._waiting and self._start(*self._waiting[0]):
            self._waiting.popleft()

    def _start(self, one: Conversation, prompt: array[int]) -> bool:
        """See ``_admit``: one turn."""
        store, machine = self._store, self._machine
        acquired = store.acquire(one.trace.tenant, one.name, prompt)
        if acquired is None:
            return False
        session = one.session = acquired.session
        store.resume(session, one.arrived)
        turn = one.trace.turns[one.at]
        known = len(prompt) - max(1, round(turn.tokens / GRAIN)) if one.at else acquired.reused
        known = min(known, len(prompt) - 1)
        stored = max(0, known - acquired.reused) if machine.disk else 0
        session.on_fed(len(prompt) - session.length)
        computed = len(prompt) - acquired.reused - stored
        if self.now >= self._begin:
            self.report.computed += computed * GRAIN
            self.report.new += (len(prompt) - known) * GRAIN
            if one.at:
                lost = known > acquired.reused + stored
                self.report.starts[STARTS[2 if lost else 1 if stored or acquired.restored else 0]] += 1
        pages = GRAIN * machine.token_bytes
        ready = self.now
        if acquired.restored:
            ready = self._work("host", acquired.restored * pages / machine.host_rate)
        if stored:
            ready = max(ready, self._work("disk", stored * pages / machine.disk_rate))
        self._at(ready, lambda: self._compute(one, computed * GRAIN))
        return True

    def _compute(self, one: Conversation, tokens: int) -> None:
        """The prompt is computed, then the reply is generated."""
        first = self._work("model", tokens / self._machine.prefill)
        if one.arrived >= self._begin:
            self.report.waits.append(first - one.arrived)
        self._at(first + one.trace.turns[one.at].seconds, lambda: self._finish(one))

    def _finish(self, one: Conversation) -> None:
        """A turn has ended: its session is idle, and the next turn comes after the gap."""
        store, session, turn = self._store, one.session, one.trace.turns[one.at]
        assert session is not None
        output = one.more(turn.output)
        one.timeline = array("i", session.token_ids) + output
        session.token_ids.extend(output)
        if store.reserve(session, len(session.token_ids)):
            session.on_fed(len(output))
        stop = store.retention.stop(one.trace.tenant, StopKind.ANSWER)
        store.release(session, stop)
        if turn.tools:
            store.retention.await_tools(stop, turn.tools)
        one.session, one.at = None, one.at + 1
        self._held -= self._open.pop(one.name, 0)
        if one.at < len(one.trace.turns):
            self._open[one.name] = len(one.timeline)
            self._held += len(one.timeline)
            self.report.peak = max(self.report.peak, self._held)
            self._at(self.now + one.trace.turns[one.at].gap, lambda: self._arrive(one))
        self._admit()


def compare(
    trace: Sequence[TraceSession], options: argparse.Namespace, begin: float, end: float
) -> dict[tuple[float, str], Report]:
    """The reports by how many times less memory there is, and the policy; 0 times: without a limit."""
    speeds = (options.prefill, options.token_bytes, options.host_rate, options.disk_rate)
    most = sum(sum(turn.tokens + turn.output for turn in session.turns) // GRAIN + 8 for session in trace)
    most = min(most, 1 << 20)
    whole = Simulation(trace, Machine(most, 0, False, *speeds), LeastRecentlyUsed, begin, end).run()
    reports = {(0.0, "unlimited"): whole}
    for over in options.over:
        device = max(round(whole.peak / over), 2 * LONGEST // GRAIN)
        machine = Machine(device, round(options.host * device), bool(options.disk), *speeds)
        for name, policy in (("LRU", LeastRecentlyUsed), ("think time", Retention)):
            reports[over, name] = Simulation(trace, machine, policy, begin, end).run()
    return reports


def describe(runs: Sequence[dict[tuple[float, str], Report]]) -> str:
    """A table of the runs' means."""
    rows = []
    for over, name in runs[0]:
        reports = [run[over, name] for run in runs]
        bases = [run[0.0, "unlimited"] for run in runs]
        ratio = mean(report.wait(0.95) / base.wait(0.95) for report, base in zip(reports, bases, strict=True))
        rows.append(
            (
                f"{over:g}x" if over else "no limit",
                name,
                *(f"{100 * mean(report.share(start) for report in reports):.1f} %" for start in STARTS),
                f"{mean(report.computed / max(1, report.new) for report in reports):.2f}",
                f"{mean(report.wait(0.5) for report in reports):.2f} s",
                f"{mean(report.wait(0.95) for report in reports):.2f} s",
                f"{ratio:.2f}",
            )
        )
    return table(
        "oversubscribed | policy | warm | loaded | recomputed | amplification | wait p50 | wait p95 | p95 / no limit",
        rows,
    )


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--hours", type=float, default=4.0, help="simulated time, of which the first quarter is left out"
    )
    parser.add_argument("--every", type=float, default=40.0, help="seconds between two sessions that begin, on average")
    parser.add_argument("--seeds", type=int, default=3, help="how many traces to draw")
    parser.add_argument("--over", type=float, nargs="+", default=[1.0, 2.0, 4.0], help="times that memory is too small")
    parser.add_argument("--pace", type=float, default=1.0, help="by which all pauses are multiplied")
    parser.add_argument("--host", type=float, default=1.0, help="size of the host as a multiple of the device's")
    parser.add_argument("--disk", type=int, default=1, help="0: there is none")
    parser.add_argument("--prefill", type=float, default=8000.0, help="tokens a second")
    parser.add_argument("--token-bytes", type=int, default=131_072, help="bytes of KV per token")
    parser.add_argument("--host-rate", type=float, default=2e10, help="bytes a second from the host")
    parser.add_argument("--disk-rate", type=float, default=3e9, help="bytes a second from the disk")
    parser.add_argument("--trace", type=Path, help="a file with a session a line, in place of drawn ones")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> str:
    """Run, and return the table."""
    options = options_of(arguments)
    end = 3600 * options.hours
    runs = []
    for seed in range(1 if options.trace else options.seeds):
        rng = random.Random(seed)
        trace = load(options.trace) if options.trace else list(draw(rng, end, options.every, options.pace))
        runs.append(compare(trace, options, end / 4, end))
    return describe(runs)


if __name__ == "__main__":
    print(main())
