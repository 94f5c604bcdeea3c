"""``News``: an event for one waiter."""

from __future__ import annotations

import asyncio


class News:
    """As ``asyncio.Event``, for one task that waits at a time. That class keeps a queue of waiters, which would take
    0.7 KB of each turn.
    """

    __slots__ = ("_heard", "_waiter")

    def __init__(self) -> None:
        self._heard = False
        self._waiter: asyncio.Future[None] | None = None

    def is_set(self) -> bool:
        """Whether it was set and not cleared."""
        return self._heard

    def set(self) -> None:
        """Wake the waiter; until ``clear``, nobody waits."""
        self._heard = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        self._heard = False

    async def wait(self) -> None:
        """Return once it is set."""
        if self._heard:
            return
        assert self._waiter is None, "one task waits"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
