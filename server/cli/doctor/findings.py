"""``Finding``: one result of a check, with its level, its text, and advice."""

from __future__ import annotations

import queue
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from typing import Any

import msgspec

LABEL = 18  # columns in front of the text


class Level(StrEnum):
    """``WARNING``: it runs, but not as it could. ``FAULT``: the server would not start, or not serve."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


class Finding(msgspec.Struct, frozen=True):
    """``advice``: what to do, for all but OK. ``figures``: what was measured, for programs: bytes, seconds, counts."""

    check: str
    level: Level
    text: str
    advice: str = ""
    figures: dict[str, Any] = {}

    def lines(self, width: int) -> list[str]:
        """For people, in so many columns."""
        head = f"{self.level:<8} {self.check:<8} "
        lines = textwrap.wrap(
            self.text, width, initial_indent=head, subsequent_indent=" " * LABEL, break_on_hyphens=False
        )
        indent = " " * LABEL + "-> "
        return lines + textwrap.wrap(
            self.advice,
            width,
            initial_indent=indent,
            subsequent_indent=" " * len(indent),
            break_on_hyphens=False,
            break_long_words=False,
        )


def ok(check: str, text: str, **figures: Any) -> Finding:
    """Nothing to do."""
    return Finding(check, Level.OK, text, "", figures)


def warning(check: str, text: str, advice: str, **figures: Any) -> Finding:
    """It runs, but not as it could."""
    return Finding(check, Level.WARNING, text, advice, figures)


def fault(check: str, text: str, advice: str, **figures: Any) -> Finding:
    """It would not start, or not serve."""
    return Finding(check, Level.FAULT, text, advice, figures)


def within(seconds: float, name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of a check as it makes them, for so many seconds. One that takes longer, as a disk or network that
    hangs makes it, is a fault and is left behind on its thread; one that breaks is a warning."""
    found: queue.SimpleQueue[Finding | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            for finding in check():
                found.put(finding)
        except Exception as error:  # a doctor that falls ill still tells of the rest
            found.put(warning(name, f"this check failed: {type(error).__name__}", "see the other lines"))
        found.put(None)

    threading.Thread(target=run, name=name, daemon=True).start()
    until = time.monotonic() + seconds
    while True:
        try:
            finding = found.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            yield fault(name, f"no result within {seconds:.0f} seconds", "what it checks hangs")
            return
        if finding is None:
            return
        yield finding


def size(count: float) -> str:
    """Bytes for people: powers of 1024, three digits."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
