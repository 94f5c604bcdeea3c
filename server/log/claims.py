"""``Claims``: exclusive use of sessions within this process, each by one turn or change at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

Key = tuple[str, str]  # tenant, session


class SessionBusy(Exception):
    """A turn or another change of this session is running. HTTP 409."""


class Claims:
    """The sessions that are claimed in this process. Used on the event loop's thread only."""

    def __init__(self) -> None:
        self._held: dict[Key, asyncio.Event] = {}  # set when it is free again
        self._awaited: Counter[Key] = Counter()

    def claimed_keys(self) -> frozenset[Key]:
        return frozenset(self._held)

    def end_of(self, key: Key) -> asyncio.Event | None:
        """An event that is set when the current claim of the session ends; None if it is not claimed."""
        return self._held.get(key)

    @contextmanager
    def claim(self, key: Key) -> Iterator[None]:
        """Claim a session. Raises SessionBusy if it is claimed or waited for."""
        if key in self._held or self._awaited[key]:
            raise SessionBusy
        with self._hold(key):
            yield

    @asynccontextmanager
    async def claim_when_free(self, key: Key, seconds: float) -> AsyncIterator[None]:
        """Claim a session as soon as it is free. Raises SessionBusy if it is not within ``seconds``."""
        self._awaited[key] += 1
        try:
            async with asyncio.timeout(seconds):
                while key in self._held:
                    await self._held[key].wait()
        except TimeoutError:
            raise SessionBusy from None
        finally:
            self._awaited[key] -= 1
            if not self._awaited[key]:
                del self._awaited[key]
        with self._hold(key):
            yield

    @contextmanager
    def _hold(self, key: Key) -> Iterator[None]:
        free = self._held[key] = asyncio.Event()
        try:
            yield
        finally:
            del self._held[key]
            free.set()
