"""``FairQueue``: the waiting turns, in an order that is fair between tenants."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator

from scheduler.core.turn import Turn


class QueueFull(Exception):
    """No more turns can wait."""


class FairQueue:
    """Waiting turns, first come first served for each tenant; the tenant that was served least goes first.

    The counters are those of the Virtual Token Counter (Sheng et al., 2024): served tokens per tenant. When a tenant
    becomes active again its counter is raised to the lowest of the active tenants, so that it gains nothing by being
    idle.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lines: defaultdict[str, deque[Turn]] = defaultdict(deque)
        self._served: dict[str, int] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, turn: Turn, active: set[str]) -> None:
        """Line up a new turn; ``active`` tenants have turns running. Raises ``QueueFull``."""
        if self._size >= self._capacity:
            raise QueueFull
        tenant = turn.request.tenant
        if tenant not in active and not self._lines[tenant]:
            busy = [self._served.get(t, 0) for t in self._lines if self._lines[t]] + [self._served[t] for t in active]
            self._served[tenant] = max(self._served.get(tenant, 0), min(busy, default=0))
        self._lines[tenant].append(turn)
        self._size += 1

    def find_crowding(self, tenant: str) -> Turn | None:
        """The newest turn of the tenant with the most waiting turns, if these would still be more than those of
        ``tenant`` with one turn more: in a full queue, the new turn may replace it. Turns that have begun are not
        replaced. None if there is no such turn, or preempted turns have overfilled the queue.
        """
        if self._size > self._capacity:
            return None
        longest = max(self._lines.values(), key=len, default=deque[Turn]())
        if len(longest) <= len(self._lines.get(tenant, ())) + 1:
            return None
        return next((turn for turn in reversed(longest) if not turn.announced and turn.fetch is None), None)

    def put_back(self, turn: Turn) -> None:
        """Line up a preempted turn again, first; never refused."""
        self._lines[turn.request.tenant].appendleft(turn)
        self._size += 1

    def remove(self, turn: Turn) -> None:
        """Take ``turn`` out, wherever it stands."""
        line = self._lines[turn.request.tenant]
        line.remove(turn)
        self._size -= 1
        if not line:
            del self._lines[turn.request.tenant]

    def served(self, tenant: str) -> int:
        """Tokens fed for ``tenant`` so far, as far as fairness remembers."""
        return self._served.get(tenant, 0)

    def charge(self, tenant: str, tokens: int) -> None:
        """``tokens`` were fed for ``tenant``."""
        self._served[tenant] = self._served.get(tenant, 0) + tokens

    def in_order(self, depth: int) -> Iterator[Turn]:
        """Up to ``depth`` turns of each tenant, the least served tenant's first."""
        for tenant in sorted(self._lines, key=self.served):
            yield from list(self._lines[tenant])[:depth]

    def __iter__(self) -> Iterator[Turn]:
        for line in self._lines.values():
            yield from line
