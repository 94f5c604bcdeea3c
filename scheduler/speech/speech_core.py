"""``SpeechCore``: the windows that wait to be heard, and the thread that hears them, several at a time."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from scheduler.engine_stats import Stats
from scheduler.speech.recogniser import Recogniser, likeness
from scheduler.speech_messages import Transcribe, Transcribed

log = logging.getLogger("warmturn.engine")

FAILED = "The model failed at this sound."


class SpeechCore:
    """Windows are heard in the order in which they came; those that ask for the same as the first one join its batch.
    A request sends one window after the other, so a long sound never keeps a short one waiting for more than a batch.
    ``ask``, ``take`` and ``stats`` belong to one thread.
    """

    def __init__(self, recogniser: Recogniser) -> None:
        self._recogniser = recogniser
        self._waiting: deque[Transcribe] = deque()
        self._answers: deque[Transcribed] = deque()
        self._changed = threading.Condition()
        self._running = 0
        self._batches = 0
        self._windows = 0
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._work, name="speech", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether windows wait, run, or have answers that were not taken."""
        return bool(self._waiting or self._running or self._answers)

    @property
    def stats(self) -> Stats:
        """Gauges and counters."""
        return Stats(
            running=self._running,
            waiting=len(self._waiting),
            steps=self._batches,
            windows=self._windows,
            encoder_seconds=self._seconds,
        )

    def ask(self, window: Transcribe) -> None:
        with self._changed:
            self._waiting.append(window)
            self._changed.notify()

    def take(self) -> list[Transcribed]:
        """The answers since the last call."""
        found = []
        while self._answers:
            found.append(self._answers.popleft())
        return found

    def _work(self) -> None:
        while True:
            batch = self._next()
            started = time.perf_counter()
            self._answers.extend(self._hear(batch))
            self._seconds += time.perf_counter() - started
            self._batches += 1
            self._windows += len(batch)
            self._running = 0

    def _next(self) -> list[Transcribe]:
        """The windows to hear now; waits for the first."""
        with self._changed:
            while not self._waiting:
                self._changed.wait()
            alike = likeness(self._waiting[0])
            batch = [one for one in self._waiting if likeness(one) == alike][: self._recogniser.together]
            self._waiting = deque(one for one in self._waiting if not any(one is taken for taken in batch))
            self._running = len(batch)
        return batch

    def _hear(self, batch: Sequence[Transcribe]) -> list[Transcribed]:
        try:
            return self._recogniser.hear(batch)
        except Exception:  # whatever a model raises: the others of the batch are asked alone
            if len(batch) > 1:
                return [answer for one in batch for answer in self._hear([one])]
            log.exception("a sound could not be written down")
            return [Transcribed(batch[0].request, error=FAILED)]
