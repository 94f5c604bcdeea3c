"""kill -9 at every single call that changes a file, see ``sweep``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from crash.sweep import Sweep
from crash.tracer import usable
from crash.victim import EXACT, Victim
from server_process import ServerProcess

EVERY = int(os.environ.get("CRASH_EVERY", "1"))  # of the calls of a kind, only every so manieth is a crash point


@pytest.mark.slow
@pytest.mark.skipif(not usable(), reason="needs strace, and leave to attach to other processes")
@pytest.mark.parametrize("process", ["server", "engine"])
def test_a_kill_at_every_write_loses_nothing(process: str, tmp_path: Path) -> None:
    data, other = tmp_path / "data", tmp_path / "reference"
    data.mkdir()
    other.mkdir()
    with ServerProcess(None, other, *EXACT) as reference, Victim(data) as victim:
        sweep = Sweep(victim, reference.url, process, tmp_path / "strace")
        sweep.run(EVERY)
    assert sweep.wrong == []
    assert sweep.kills > 10 * sweep.missed
