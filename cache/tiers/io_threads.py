"""Background threads for file and network I/O; their results are handled on the thread that owns the cache."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class IoThreads:
    """A few threads and their results. ``poll`` runs the callbacks on the thread that calls it."""

    def __init__(self) -> None:
        self._done: deque[Callable[[], None]] = deque()
        self._under_way = 0
        self._pools: list[ThreadPoolExecutor] = []

    def queue(self, name: str, threads: int) -> WorkQueue:
        """A queue with threads of its own; with one thread its work is done in order."""
        pool = ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=_prepare)
        self._pools.append(pool)
        return WorkQueue(pool, self)

    def poll(self) -> None:
        """Run the callbacks of finished work."""
        while self._done:
            self._under_way -= 1
            self._done.popleft()()

    @property
    def busy(self) -> bool:
        """Whether work is in progress, or results wait for ``poll``."""
        return self._under_way > 0

    def run(self, pool: ThreadPoolExecutor, work: Callable[[], T], then: Callable[[T | Exception], None]) -> None:
        """Run ``work`` on a thread of ``pool``, and at a later ``poll`` call ``then`` with its result or exception."""

        def running() -> None:
            outcome: T | Exception
            try:
                outcome = work()
            except Exception as error:
                outcome = error
            self._done.append(lambda: then(outcome))

        self._under_way += 1
        pool.submit(running)

    def close(self) -> None:
        """Wait for running work, and cancel work that has not begun."""
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)


class WorkQueue:
    """A queue of work for one pool of threads."""

    def __init__(self, pool: ThreadPoolExecutor, background: IoThreads) -> None:
        self._pool = pool
        self._background = background

    def submit(self, work: Callable[[], T], then: Callable[[T | Exception], None]) -> None:
        """See ``IoThreads.run``."""
        self._background.run(self._pool, work, then)


def _prepare() -> None:
    torch.set_num_threads(1)  # of this thread: the step keeps its cores
    torch.set_grad_enabled(False)
