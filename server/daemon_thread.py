"""Runs one blocking call on a daemon thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def in_daemon_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run ``work`` on a daemon thread called ``name``, which, unlike a pool's thread, does not delay the exit of the
    process. The future has what it returns or raises.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(outcome: T | Exception) -> None:
        if result.done():
            return
        if isinstance(outcome, Exception):
            result.set_exception(outcome)
            result.exception()  # whoever waits hears it; nobody has to
        else:
            result.set_result(outcome)

    def run() -> None:
        outcome: T | Exception
        try:
            outcome = work()
        except Exception as error:
            outcome = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result
