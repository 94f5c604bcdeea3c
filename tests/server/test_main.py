"""`warmturn serve` starts its engine process early, and leaves none behind when there is nothing to serve."""

import subprocess
import sys

import pytest

from server.__main__ import main
from server.engine.launcher import EngineLauncher

ENGINE = (sys.executable, "-c", "import sys; sys.stdin.read()")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list["subprocess.Popen[bytes]"]:
    """The engine processes that have been started."""
    processes = []
    start = EngineLauncher._start

    def recorded(launcher: EngineLauncher, output: int) -> "subprocess.Popen[bytes]":
        processes.append(start(launcher, output))
        return processes[-1]

    monkeypatch.setattr(EngineLauncher, "_start", recorded)
    return processes


@pytest.mark.parametrize("arguments", [("--port", "many"), ("--no-such-flag",), ("--host", "no.such.host.invalid")])
def test_a_fault_in_the_command_line_leaves_no_engine_process(
    arguments: tuple[str, ...], started: list["subprocess.Popen[bytes]"], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments], ENGINE) == 2
    assert [process.returncode for process in started] == [-9]
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("arguments", [("serve", "--help"), ("serve", "--port", "1", "-h"), ("doctor", "--help")])
def test_help_starts_no_engine_process(
    arguments: tuple[str, ...], started: list["subprocess.Popen[bytes]"], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments, ENGINE)
    assert (exit_.value.code, started) == (0, [])
    assert "usage: warmturn" in capsys.readouterr().out


def test_an_interrupted_command_ends_with_130_and_without_an_engine_process(
    started: list["subprocess.Popen[bytes]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(arguments: object, launcher: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("server.commands.run", interrupted)
    assert main(["serve"], ENGINE) == 130
    assert [process.returncode for process in started] == [-9]
