"""``Claims``: exclusive use of sessions within this process, each by one turn or change at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

Key = tuple[str, str]  # tenant, session


class SessionBusy(Exception):
    """A turn or a change of this session is running."""


class Claims:
    """Which sessions are held in this process. Used by the event loop's thread only."""

    def __init__(self) -> None:
        self._held: dict[Key, asyncio.Event] = {}  # set when it is free again
        self._awaited: Counter[Key] = Counter()

    def held(self) -> frozenset[Key]:
        """The sessions that are held now."""
        return frozenset(self._held)

    def end_of(self, key: Key) -> asyncio.Event | None:
        """What is set when the session is free of who holds it now; None where nobody does."""
        return self._held.get(key)

    @contextmanager
    def claim(self, key: Key) -> Iterator[None]:
        """Hold a session. Raises SessionBusy if it is held or waited for."""
        if key in self._held or self._awaited[key]:
            raise SessionBusy
        with self._hold(key):
            yield

    @asynccontextmanager
    async def claim_when_free(self, key: Key, seconds: float) -> AsyncIterator[None]:
        """Hold a session as soon as it is free. Raises SessionBusy if it is not within ``seconds``."""
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
