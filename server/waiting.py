"""The turns that wait in the engine, as the server counts them: who would find the queue full need not be read."""

from __future__ import annotations

from collections import Counter


class Waiting:
    """Turns that were sent to the engine and have not been admitted, by tenant, and requests that are being read for
    one: they have taken their places. ``capacity`` is that of the engine's queue."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._tenants: dict[str, str] = {}  # turn -> tenant
        self._lines: Counter[str] = Counter()  # tenant -> how many
        self._read: set[str] = set()

    @property
    def reading(self) -> int:
        """How many requests are being read."""
        return len(self._read)

    def read(self, name: str, tenant: str) -> None:
        """A request begins to be read; it is removed when its turn is added, or when it comes to none."""
        self._read.add(name)
        self.add(name, tenant)

    def add(self, turn: str, tenant: str) -> None:
        """A turn was sent."""
        self._tenants[turn] = tenant
        self._lines[tenant] += 1

    def remove(self, turn: str) -> None:
        """A turn was admitted, was refused or has ended. Idempotent."""
        self._read.discard(turn)
        tenant = self._tenants.pop(turn, None)
        if tenant is not None:
            self._lines[tenant] -= 1
            if not self._lines[tenant]:
                del self._lines[tenant]

    def clear(self) -> None:
        """The engine is gone."""
        self._tenants.clear()
        self._lines.clear()
        self._read.clear()

    def full(self, tenant: str) -> bool:
        """Whether one more turn of this tenant would be refused, as ``scheduler.queue`` decides it: also in a full
        queue it takes the place of another one's, where that one's line is longer than its own would be."""
        if len(self._tenants) < self._capacity:
            return False
        return max(self._lines.values()) <= self._lines[tenant] + 1
