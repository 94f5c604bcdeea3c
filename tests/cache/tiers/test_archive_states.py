"""States beyond their budget: a session is written before it is dropped, where there is a disk."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from archive_kit import TALK, check, check_and_settle, reused
from engine_kit import Kit, failing

from cache.segments.segment_file import write
from cache.tiers import write_behind as saver_module

STATEFUL = ["mamba2", "qwen3_next", "rwkv"]


def one(name: str) -> int:
    """Bytes of the states of one idle session."""
    kit = Kit(name)
    kit.ask(TALK, 4)
    return kit.store.residency.state_total


@pytest.mark.parametrize("name", STATEFUL)
def test_a_session_beyond_the_budget_is_on_disk_before_it_is_dropped(name: str, tmp_path: Path) -> None:
    kit = Kit(name, state_budget=1, folder=tmp_path)
    first = check_and_settle(kit, TALK, session="s")
    assert len(kit.store.residency) == 0
    fresh = kit.restarted()
    outcome = check(fresh, [*TALK, *first.tokens, 1, 2], session="s")
    assert reused(outcome) == (len(TALK) + 3, len(TALK) + 3)


def test_sessions_wait_for_a_write_that_is_getting_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, go = one("mamba2"), threading.Event()

    def waiting(*args: Any) -> Any:
        go.wait(120)
        return write(*args)

    monkeypatch.setattr(saver_module, "write", waiting)
    kit = Kit("mamba2", state_budget=2 * size, folder=tmp_path)
    kit.archive.write_behind._limit = 1  # one file at a time
    for number in range(6):
        kit.ask([number, *TALK], 1, session=f"s{number}")
        kit.step()
    assert kit.archive.write_behind.pending == 6
    assert len(kit.store.residency) == 5  # the first one is being written: it need not wait for that
    go.set()
    kit.settle()
    assert len(kit.store.residency) <= 2
    assert len(kit.archive.disk.heads) == 6


def test_a_disk_that_takes_nothing_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = one("mamba2")
    monkeypatch.setattr(saver_module, "write", failing(OSError(28, "No space left on device")))
    kit = Kit("mamba2", state_budget=2 * size, folder=tmp_path)
    for number in range(6):
        kit.ask([number, *TALK], 4, session=f"s{number}")
        until = time.monotonic() + 20
        while kit.archive._background.busy and time.monotonic() < until:
            kit.step()
        kit.step()
    assert len(kit.store.residency) <= 2


def test_pins_do_not_keep_the_newest_session_out() -> None:
    size = one("mamba2")
    kit = Kit("mamba2", state_budget=2 * size + size // 2)
    for number in range(3):
        kit.ask([number, *TALK], 4, session=f"s{number}")
        kit.store.pin("a", f"s{number}", time.time() + 1000)
    kit.ask(TALK, 4, session="newest")
    assert kit.store.find("a", "newest") is not None
    assert len(kit.store.residency) == 2


def test_a_pinned_session_leaves_last() -> None:
    size = one("mamba2")
    kit = Kit("mamba2", state_budget=2 * size + size // 2)
    kit.ask(TALK, 4, session="pinned")
    kit.store.pin("a", "pinned", time.time() + 1000)
    for number in range(4):
        kit.ask([number, *TALK], 4, session=f"s{number}")
    assert kit.store.find("a", "pinned") is not None
    assert kit.store.find("a", "s3") is not None
    assert len(kit.store.residency) == 2
