"""The simulation of retention: traces have the published figures, and the engine's policy shows in its reports."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pytest

from cache.pages.retention import Retention
from tools.agent_traces import TraceSession, TraceTurn, draw, load, save
from tools.simulate_retention import GRAIN, LeastRecentlyUsed, Machine, Report, Simulation, main

pytestmark = pytest.mark.wide

TOKENS = 20 * GRAIN


def conversation(start: float, gaps: Sequence[float], tools: tuple[str, ...] = ()) -> TraceSession:
    """Turns after these gaps; all but the last call ``tools``."""
    turns = [TraceTurn(0.0, TOKENS, GRAIN, 1.0, tools)]
    turns += [TraceTurn(gap, GRAIN, GRAIN, 1.0, tools) for gap in gaps]
    return TraceSession("t1", start, tuple(turns))


def run(
    trace: Sequence[TraceSession], policy: type[Retention], device: int, host: int = 0, disk: bool = False
) -> Report:
    """The report of a trace from its beginning."""
    machine = Machine(device, host, disk, prefill=TOKENS, token_bytes=1, host_rate=TOKENS, disk_rate=TOKENS / 10)
    return Simulation(trace, machine, policy, 0.0, 1e6).run()


def test_traces_have_the_published_figures(tmp_path: Path) -> None:
    sessions = list(draw(random.Random(1), 3600.0, 3.0))
    assert 0.5 < sum(sum(not turn.tools for turn in one.turns) == 1 for one in sessions) / len(sessions) < 0.67
    assert 12 <= median(len(one.turns) for one in sessions) <= 25  # 15, but no fewer than requests
    after = [(turn.tools, later.gap) for one in sessions for turn, later in zip(one.turns, one.turns[1:], strict=False)]
    assert 0.2 < median(gap for tools, gap in after if tools) < 0.45
    assert 60 < median(gap for tools, gap in after if not tools) < 110
    assert 4.5 < median(turn.seconds for one in sessions for turn in one.turns) < 7
    save(tmp_path / "trace", sessions)
    assert load(tmp_path / "trace") == sessions


def test_with_room_for_all_every_turn_is_warm() -> None:
    report = run([conversation(0.0, [5.0, 50.0]), conversation(1.0, [9.0])], Retention, 1000)
    assert report.starts == {"warm": 3}
    assert report.computed == report.new == 2 * TOKENS + 3 * GRAIN
    assert report.waits[0] == 1.0


@pytest.mark.parametrize(
    ("host", "disk", "start"), [(60, False, "loaded"), (0, True, "loaded"), (0, False, "recomputed")]
)
def test_what_has_left_the_device_is_loaded_or_computed(host: int, disk: bool, start: str) -> None:
    trace = [conversation(0.0, [500.0]), conversation(100.0, [1000.0])]
    report = run(trace, LeastRecentlyUsed, 30, host, disk)
    assert report.starts[start] >= 1
    assert (report.computed > report.new) is (start == "recomputed")


def test_a_pause_for_a_tool_outlives_answers_under_the_policy_only() -> None:
    busy = conversation(0.0, [20.0] * 8, tools=("build",))
    questions = [conversation(3.0 + 8 * number, []) for number in range(20)]
    warm = {policy: run([busy, *questions], policy, 50).starts["warm"] for policy in (LeastRecentlyUsed, Retention)}
    assert warm[Retention] > warm[LeastRecentlyUsed]


def test_the_table_has_a_row_for_each_size_and_policy(tmp_path: Path) -> None:
    save(tmp_path / "trace", [conversation(900.0 + 10.0 * number, [30.0, 60.0]) for number in range(5)])
    lines = main(["--trace", str(tmp_path / "trace"), "--hours", "1", "--over", "1", "4"]).splitlines()
    assert len(lines) == 2 + 1 + 2 * 2
    assert lines[2].startswith("| no limit | unlimited | 100.0 %")
