"""Engine processes are started with a suitable environment, and one that is started early is used or killed."""

import sys
from pathlib import Path

import pytest

from server.engine.launcher import EngineLauncher, engine_environment

ECHO = (sys.executable, "-c", "import sys; sys.exit(len(sys.stdin.read()))")


def test_the_engines_environment_has_bounded_kernel_caches_unless_the_user_says_otherwise_and_no_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    monkeypatch.setenv("WARMTURN_DATABASE", "postgresql://user:secret@host/name")
    environment = engine_environment()
    assert "WARMTURN_DATABASE" not in environment
    assert (environment["LRU_CACHE_CAPACITY"], environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) == ("128", "7")


def test_an_engines_threads_wait_as_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert engine_environment()["GOMP_SPINCOUNT"] == "3000"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert "GOMP_SPINCOUNT" not in engine_environment()


def test_the_process_started_early_is_launched_first_and_once() -> None:
    launcher = EngineLauncher(ECHO)
    launcher.start_early()
    early = launcher._early
    assert early is not None
    first, second = launcher.launch(), launcher.launch()
    launcher.discard()  # of what was launched, nothing
    assert (first, first.poll()) == (early, None)
    assert second.pid != first.pid
    for process in (first, second):
        process.communicate(b"abc")
        assert process.returncode == 3


def test_a_process_that_was_not_launched_is_killed() -> None:
    launcher = EngineLauncher(ECHO)
    launcher.start_early()
    early = launcher._early
    assert early is not None
    launcher.discard()
    assert not Path(f"/proc/{early.pid}").exists()
    launcher.discard()


def test_a_command_that_cannot_be_started_fails_when_it_is_launched() -> None:
    launcher = EngineLauncher(("/no/such/program",))
    launcher.start_early()
    with pytest.raises(FileNotFoundError):
        launcher.launch()
