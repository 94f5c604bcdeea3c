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
    """Runs calls to remote storage with a time limit, and runs none for ``rest`` seconds after a failure.

    Calls come from one thread; ``away`` may be read from any. Exceptions are ``OSError`` with a message that names only
    the kind of failure: messages of the remote side may contain addresses and credentials.
    """

    def __init__(self, rest: float = REST) -> None:
        self._rest = rest
        self._until = 0.0
        self._abandoned: list[Thread] = []

    @property
    def away(self) -> bool:
        """Whether the next call would fail without being tried."""
        stuck = sum(thread.is_alive() for thread in self._abandoned)
        return time.monotonic() < self._until or stuck >= MOST_ABANDONED

    def run(self, work: Callable[[], T], seconds: float) -> T:
        """Returns the result of ``work``. Raises FileNotFoundError or FileExistsError if it does, OSError for any other
        exception, and TimeoutError after ``seconds``; ``work`` then continues and its result is discarded, so it must
        not change shared state.
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
