"""Requests to the engine that wait for an answer: where the KV of a session is, its export, its import; what stands for
pictures; what is said in a sound; embeddings and scores.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable
from typing import TypeVar

from scheduler.adapter_messages import AdapterLoaded, LoadAdapter
from scheduler.engine_stats import Stats
from scheduler.pooling_messages import Pool, Pooled
from scheduler.protocol import (
    Answer,
    Expand,
    Expanded,
    Export,
    Exported,
    Import,
    Imported,
    Inspect,
    Inspected,
)
from scheduler.speech_messages import Transcribe, Transcribed
from server.engine.engine import EngineDied, EngineUnavailable

A = TypeVar("A", Inspected, Exported, Imported, Expanded, AdapterLoaded, Transcribed, Pooled)

Question = Inspect | Export | Import | Expand | LoadAdapter | Transcribe | Pool

PATIENCE = 120.0  # seconds without a sign of progress; a disk that syncs gigabytes gives none for long
RETRY = 5  # seconds, told to a client whose question was


class EngineCalls:
    """Calls that wait for an answer. Each ends exactly once: with its answer, when the engine dies, or by timeout."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Future[Answer]] = {}

    async def ask(
        self, question: Question, kind: type[A], send: Callable[[Question], None], progress: Callable[[], object]
    ) -> A:
        """Send ``question`` with ``send`` and wait for its answer. It times out when ``progress`` returns the same
        value (not None) for ``PATIENCE``, at the latest after twice that. Raises EngineDied and EngineUnavailable, and
        what ``send`` raises.
        """
        future = self._open[question.request] = asyncio.get_running_loop().create_future()
        try:
            send(question)
            seen: object = None
            while not (await asyncio.wait((future,), timeout=PATIENCE))[0]:
                before, seen = seen, progress()
                if seen == before:
                    raise EngineUnavailable("The engine did not answer in time.", RETRY)
            answer = future.result()
        finally:
            del self._open[question.request]
        assert isinstance(answer, kind), f"a {type(question).__name__} was answered by a {type(answer).__name__}"
        return answer

    def answer(self, answer: Answer) -> None:
        """Pass an answer to its waiting call, unless that has timed out."""
        future = self._open.get(answer.request)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail(self, message: str) -> None:
        """The engine died: end all waiting calls with EngineDied."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(EngineDied(message))


def progress_of(stats: Stats, folder: str | None) -> object:
    """Another value while the engine hears sounds or embeds, and while it reads or writes KV in ``folder``, also in the
    middle of a large file.
    """
    free = None
    if folder is not None:
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(folder).free
    return stats.windows, stats.pooled, stats.disk_written, stats.disk_read, free
