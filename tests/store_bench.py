"""A session store for tests. Every stored token is marked with a number that only its whole prefix can give, so
a page that is shared, copied, moved, cut or reused wrongly shows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import accumulate

import torch

from cache.memory.memory_tier import MemoryTier, PageShape
from cache.pages.pool import PagePool
from cache.pages.retention import Retention
from cache.pages.session import SessionCache
from cache.pages.session_memory import Acquired
from cache.store import SessionStore

CPU = torch.device("cpu")
SIZE = 4


def marks(tokens: array[int]) -> list[int]:
    """One number per token, which depends on every token up to it; exact in float64."""
    return list(accumulate(tokens, lambda mark, token: (mark * 1_000_003 + token + 1) % 2**50, initial=7))[1:]


class Bench:
    """A store over marked pages."""

    def __init__(self, device: int, host: int = 0, clock: Callable[[], float] = lambda: 0.0) -> None:
        shapes = {0: PageShape(1, 1, 1, 1, torch.float64), 2: PageShape(1, 1, 1, 1, torch.float64)}
        self.pool = PagePool(MemoryTier(device, SIZE, CPU, shapes), MemoryTier(host, SIZE, CPU, shapes))
        self.store = SessionStore(self.pool, retention=Retention(clock))

    def acquire(self, prompt: list[int], name: str | None = None, tenant: str = "a") -> Acquired:
        """Where there has to be room."""
        acquired = self.try_acquire(prompt, name, tenant)
        assert acquired is not None
        return acquired

    def try_acquire(self, prompt: list[int], name: str | None = None, tenant: str = "a") -> Acquired | None:
        acquired = self.store.acquire(tenant, name, array("i", prompt))
        if acquired is not None:
            assert list(acquired.session.token_ids) == prompt
            assert acquired.session.length == acquired.reused < len(prompt)
        self.check()
        return acquired

    def feed(self, session: SessionCache, count: int) -> None:
        """What a step does: write the next ``count`` tokens (pages are reserved), count them as fed."""
        numbers = marks(session.token_ids)[session.length : session.length + count]
        at = torch.arange(session.length, session.length + count)
        index = session.table(CPU)[at // SIZE] * SIZE + at % SIZE
        data = torch.tensor(numbers, dtype=torch.float64).reshape(1, 1, -1, 1)
        for layer in (0, 2):
            self.pool.device.write(layer, index, data + layer, -data)
        session.on_fed(count)
        self.check()

    def grow(self, session: SessionCache, tokens: list[int]) -> bool:
        """Append sampled tokens and feed them; False where there is no room."""
        session.token_ids.extend(tokens)
        if not self.store.reserve(session, len(session.token_ids)):
            del session.token_ids[session.length :]
            return False
        self.feed(session, len(session.token_ids) - session.length)
        return True

    def turn(self, prompt: list[int], name: str | None = None, tenant: str = "a") -> SessionCache:
        """A whole turn; the session is idle after it."""
        acquired = self.acquire(prompt, name, tenant)
        self.feed(acquired.session, len(prompt) - acquired.reused)
        self.store.publish(acquired.session)
        self.store.release(acquired.session)
        self.check()
        return acquired.session

    def sessions(self) -> list[SessionCache]:
        return list(self.store.residency)

    def check(self) -> None:
        """Invariants, and every mark of every session."""
        self.store.residency.check_integrity()
        for session in self.sessions():
            wanted = torch.tensor(marks(session.cached), dtype=torch.float64)
            for layer in (0, 2):
                pages = session.pages[: -(-session.length // SIZE)]
                found = [(page.tier.keys[layer][page.slot], page.tier.values[layer][page.slot]) for page in pages]
                if found:
                    keys = torch.cat([key for key, _ in found]).flatten()[: session.length]
                    values = torch.cat([value for _, value in found]).flatten()[: session.length]
                    assert torch.equal(keys, wanted + layer)
                    assert torch.equal(values, -wanted)

    def empty(self) -> None:
        """Discard everything: then nothing may be left."""
        for session in self.sessions():
            self.store.discard(session)
        assert self.pool.device.free == self.pool.device.slots
        assert self.pool.host.free == self.pool.host.slots
        assert not self.pool.stranded
        assert not self.store._named
        assert not self.store.index
        assert len(self.store.residency) == 0
