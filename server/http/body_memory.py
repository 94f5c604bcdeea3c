"""``BodyMemory``: the memory that large bodies may take together while they are read and parsed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

SMALL = 1024 * 1024  # bytes; a body up to this size does not wait
TOGETHER = 256 * 1024 * 1024  # bytes of larger bodies


class BodyMemory:
    """Bytes of bodies that are being read or parsed. A body that does not fit beside the others is not read until it
    does: its connection is not read from, so that its client waits in sending it. They take turns in the order in which
    they came.
    """

    def __init__(self, together: int = TOGETHER) -> None:
        """``together``: bytes of all larger bodies at once; at least those of the largest body."""
        self._free = together
        self._order = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """A context manager: within it, a body of ``size`` bytes is read and parsed. Waits until it fits."""
        if size <= SMALL:
            yield
            return
        async with self._order:
            while self._free < size:
                self._freed.clear()
                await self._freed.wait()
            self._free -= size
        try:
            yield
        finally:
            self._free += size
            self._freed.set()
