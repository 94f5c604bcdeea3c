"""The turns that wait in the engine, as the server counts them: who would find the queue full need not be read."""

from __future__ import annotations

from collections import Counter


class Waiting:
    """Turns that were sent to the engine and have not been admitted, by tenant. ``capacity`` is that of its queue."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._tenants: dict[str, str] = {}  # turn -> tenant
        self._lines: Counter[str] = Counter()  # tenant -> how many

    def add(self, turn: str, tenant: str) -> None:
        """A turn was sent."""
        self._tenants[turn] = tenant
        self._lines[tenant] += 1

    def remove(self, turn: str) -> None:
        """A turn was admitted, was refused or has ended. Idempotent."""
        tenant = self._tenants.pop(turn, None)
        if tenant is not None:
            self._lines[tenant] -= 1
            if not self._lines[tenant]:
                del self._lines[tenant]

    def clear(self) -> None:
        """The engine is gone."""
        self._tenants.clear()
        self._lines.clear()

    def full(self, tenant: str) -> bool:
        """Whether one more turn of this tenant would be refused, as ``scheduler.queue`` decides it: also in a full
        queue it takes the place of another one's, where that one's line is longer than its own would be."""
        if len(self._tenants) < self._capacity:
            return False
        return max(self._lines.values()) <= self._lines[tenant] + 1
