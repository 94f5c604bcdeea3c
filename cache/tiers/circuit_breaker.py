"""A circuit breaker for calls to remote storage: a time limit for each call, and a pause after a failure."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

REST = 10.0  # seconds without a try after a failure
MOST_ABANDONED = 4  # calls that never came back; with so many of them nothing new is tried

T = TypeVar("T")


class CircuitBreaker:
    """Runs calls to something far away, each with a time limit, and none for ``rest`` seconds after one failed.

    Calls come from one thread; ``away`` may be read from any. What is raised is an ``OSError`` that tells the kind of
    the failure and nothing else: the far side's own words may hold addresses and credentials.
    """

    def __init__(self, rest: float = REST) -> None:
        self._rest = rest
        self._until = 0.0
        self._abandoned: list[Thread] = []

    @property
    def away(self) -> bool:
        """Whether the next call would fail untried."""
        stuck = sum(thread.is_alive() for thread in self._abandoned)
        return time.monotonic() < self._until or stuck >= MOST_ABANDONED

    def run(self, work: Callable[[], T], seconds: float) -> T:
        """What ``work`` returns. Raises FileNotFoundError or FileExistsError as it does, for any other exception
        OSError, TimeoutError after ``seconds``; ``work`` then goes on unheard, so it may only touch what is its own.
        """
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        if self.away:
            raise OSError("the remote tier failed a moment ago and is left alone for now")
        future: Future[T] = Future()
        thread = Thread(target=_complete, args=(future, work), name="remote", daemon=True)
        thread.start()
        # Waited for with a limit: `future.result` alone could not tell our limit from a timeout within `work`.
        thread.join(seconds)
        if not future.done():
            self._abandoned.append(thread)
            failure: OSError = TimeoutError("the remote tier did not answer in time")
        elif (error := future.exception()) is None:
            return future.result()
        elif isinstance(error, FileNotFoundError):
            raise FileNotFoundError("the remote tier has no such file")
        elif isinstance(error, FileExistsError):
            raise FileExistsError("the remote tier has another file of that name")
        else:
            failure = OSError(f"the remote tier failed: {type(error).__name__}")
        self._until = time.monotonic() + self._rest
        raise failure


def _complete(future: Future[T], work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
