"""The parts of a server come in their order: the engine process first, and it loads once the log is open."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import scripted_engine
from scripted_process import pid_of

from server import instance
from server.config.serve_options import ServeConfig
from server.config.usage_error import UsageError
from server.engine.launcher import EngineLauncher
from server.instance import Instance

ROOT = Path(__file__).resolve().parents[2]
SLOW = ("fastapi", "sqlalchemy", "transformers", "torch")


def test_nothing_slow_is_imported_before_the_engine_process_is_started() -> None:
    code = f"import sys, server.__main__, server.serve; print([name for name in {SLOW} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == "[]\n", done.stderr


async def test_a_log_that_cannot_be_opened_leaves_no_engine_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log.sqlite").write_bytes(b"no database" * 1000)
    started: list[int] = []
    made = Instance(ServeConfig(data_dir=tmp_path), EngineLauncher(scripted_engine.COMMAND), tmp_path)
    opened = instance.open_session_log

    def opened_late(config: ServeConfig, folder: Path) -> object:
        started.append(pid_of(made.first_engine))
        assert made.first_engine.state() == "loading"
        return opened(config, folder)

    imported = instance.import_parts

    def imported_late() -> None:
        imported()
        while made.first_engine._link is None:  # on a thread: the loop starts the process meanwhile
            time.sleep(0.01)

    monkeypatch.setattr(instance, "open_session_log", opened_late)
    monkeypatch.setattr(instance, "import_parts", imported_late)
    async with AsyncExitStack() as stack:
        with pytest.raises(UsageError):
            await made.start(stack)
    with pytest.raises(ProcessLookupError):  # while the loop goes on, as that of a replica does
        os.kill(started[0], 0)
