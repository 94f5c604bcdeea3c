"""What tests of the tiers below memory share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_kit import Kit, Outcome

from cache.tier import Tier

TALK = list(range(20, 60))


def check(kit: Kit, prompt: list[int], count: int = 4, **options: Any) -> Outcome:
    """One turn whose tokens must be those of a from-scratch forward."""
    return kit.ask_checked(prompt, count, **options)


def check_and_settle(kit: Kit, prompt: list[int], count: int = 4, **options: Any) -> Outcome:
    """The same, and wait until the turn is written."""
    outcome = check(kit, prompt, count, **options)
    kit.settle()
    return outcome


def reused(outcome: Outcome) -> tuple[int, int]:
    """Tokens reused, and how many of them came from disk."""
    return outcome.receipt.cached, outcome.receipt.count_reused(Tier.DISK)


def files_of(folder: Path) -> list[Path]:
    """All segment files below a folder."""
    return sorted(folder.rglob("*.kv"))


def size_of_one(folder: Path) -> int:
    """Bytes of a session on disk that has said ``TALK``."""
    kit = Kit(folder=folder)
    kit.ask(TALK, 1, session="s")
    kit.leave()
    return kit.archive.disk.space.used


@contextmanager
def held(patch: pytest.MonkeyPatch, owner: Any, name: str) -> Iterator[threading.Event]:
    """Calls of that function wait for the event before they begin."""
    go = threading.Event()
    real: Callable[..., Any] = getattr(owner, name)

    def waiting(*args: Any, **options: Any) -> Any:
        go.wait(20)
        return real(*args, **options)

    with patch.context() as patching:
        patching.setattr(owner, name, waiting)
        yield go
        go.set()
