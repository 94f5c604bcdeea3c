"""A thread pool for blocking calls that may hang, such as chat templates and tokenizers with text from clients."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class WorkTimedOut(Exception):
    """The work took longer than its time limit. Its thread keeps running it."""


class NoWorkerFree(Exception):
    """No thread was free to begin the work within the time limit."""


class Job:
    """One call to run. ``begun`` is when a thread took it, by ``time.monotonic``."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.loop = asyncio.get_running_loop()
        self.result: asyncio.Future[Any] = self.loop.create_future()
        self.timer: asyncio.TimerHandle | None = None
        self.begun: float | None = None
        self.over = False
        self.hangs = False
        self.replaced = False  # another thread has taken the place of the one that runs it

    def settle(self, outcome: object) -> None:
        """Set the result, on the event loop, unless the caller has left or was told that the work timed out."""
        assert self.timer is not None
        self.timer.cancel()
        if self.result.done():
            return
        if isinstance(outcome, Exception):
            self.result.set_exception(outcome)
        else:
            self.result.set_result(outcome)


class Workers:
    """``threads`` threads, plus a replacement for each that hangs, up to ``spare``. All are daemon threads.

    Work counts as hanging after ``seconds`` on its thread, whether or not its caller still waits. A thread cannot be
    killed: it counts as ``hung`` until the work returns.
    """

    def __init__(self, threads: int, spare: int, seconds: float, stack: int = 0) -> None:
        """``stack``: bytes of each thread's stack; 0: the default size."""
        self.hung = 0
        self._stack = stack
        self._spare = spare
        self._seconds = seconds
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()  # over what a job's thread and the loop both look at
        self._threads = 0  # that take jobs
        for _ in range(threads):
            self._start()

    async def run(self, work: Callable[[], T]) -> T:
        """What ``work`` returns or raises. Raises WorkTimedOut or NoWorkerFree."""
        job = Job(work)
        job.timer = job.loop.call_later(self._seconds, self._late, job)
        self._jobs.put(job)
        result: T = await job.result
        return result

    def close(self) -> None:
        """Let each thread end after its current work."""
        for _ in range(self._threads):
            self._jobs.put(None)

    def _start(self) -> None:
        self._threads += 1
        usual = threading.stack_size(self._stack)
        threading.Thread(target=self._serve, name="worker", daemon=True).start()
        threading.stack_size(usual)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                if job.result.done():  # given up before it was begun
                    continue
                job.begun = time.monotonic()
            outcome: object
            try:
                outcome = job.work()
            except Exception as error:
                outcome = error
            with self._lock:
                job.over = True
                self.hung -= job.hangs
            with suppress(RuntimeError):  # the loop is closed
                job.loop.call_soon_threadsafe(job.settle, outcome)
            if job.replaced:
                return

    def _late(self, job: Job) -> None:
        """Tell whoever waits for a job that is late, and put another thread in the place of one that hangs."""
        with self._lock:
            if job.over:
                return
            left = 0.0 if job.begun is None else job.begun + self._seconds - time.monotonic()
            if left <= 0 and job.begun is not None:
                job.hangs = True
                job.replaced = self.hung < self._spare
                self.hung += 1
        if left > 0:
            job.timer = job.loop.call_later(left, self._late, job)
            return
        if job.replaced:
            self._threads -= 1
            self._start()
        if not job.result.done():
            job.result.set_exception(WorkTimedOut() if job.hangs else NoWorkerFree())
