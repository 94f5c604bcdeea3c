"""``FairQueue``: the waiting turns, in an order that is fair between tenants."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator

from scheduler.core.turn import Turn


class QueueFull(Exception):
    """No more turns can wait."""


class FairQueue:
    """Waiting turns, first come first served for each tenant; the tenant that was served least goes first. Spare turns
    stand in lines of their own, behind all others.

    The counters are those of the Virtual Token Counter (Sheng et al., 2024): served tokens per tenant. When a tenant
    becomes active again its counter is raised to the lowest of the active tenants, so that it gains nothing by being
    idle.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lines: defaultdict[tuple[bool, str], deque[Turn]] = defaultdict(deque)  # spare, tenant
        self._served: dict[tuple[bool, str], int] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, turn: Turn, active: set[str]) -> None:
        """Line up a new turn; ``active`` tenants have turns of its kind running. A spare one leaves places to others.
        Raises ``QueueFull``.
        """
        if self._size >= (-(-self._capacity // 2) if turn.spare else self._capacity):
            raise QueueFull
        line = line_of(turn)
        rivals = {other for other in self._lines if other[0] is turn.spare} | {(turn.spare, one) for one in active}
        if line not in rivals:
            busy = (self._served.get(other, 0) for other in rivals)
            self._served[line] = max(self._served.get(line, 0), min(busy, default=0))
        self._lines[line].append(turn)
        self._size += 1

    def find_crowding(self, tenant: str) -> Turn | None:
        """A spare turn, else the newest turn of the tenant with the most waiting turns, if these would still be more
        than those of ``tenant`` with one turn more: in a full queue, the new turn may replace it. Turns that have begun
        are not replaced. None if there is no such turn, or preempted turns have overfilled the queue.
        """
        if self._size > self._capacity:
            return None
        lines = [line for (spare, _), line in self._lines.items() if spare]
        others = [line for (spare, _), line in self._lines.items() if not spare]
        longest = max(others, key=len, default=deque[Turn]())
        if len(longest) > len(self._lines.get((False, tenant), ())) + 1:
            lines.append(longest)
        turns = (turn for line in lines for turn in reversed(line))
        return next((turn for turn in turns if not turn.announced and turn.fetch is None), None)

    def put_back(self, turn: Turn) -> None:
        """Line up a preempted turn again, first; never refused."""
        self._lines[line_of(turn)].appendleft(turn)
        self._size += 1

    def remove(self, turn: Turn) -> None:
        """Take ``turn`` out, wherever it stands."""
        line = self._lines[line_of(turn)]
        line.remove(turn)
        self._size -= 1
        if not line:
            del self._lines[line_of(turn)]

    def tokens_served(self, tenant: str, *, spare: bool = False) -> int:
        """Tokens fed for ``tenant`` so far, as far as fairness remembers; those of ``spare`` turns count apart."""
        return self._served.get((spare, tenant), 0)

    def charge(self, tenant: str, tokens: int, *, spare: bool = False) -> None:
        """``tokens`` were fed for ``tenant``."""
        self._served[spare, tenant] = self._served.get((spare, tenant), 0) + tokens

    def has_urgent(self) -> bool:
        """Whether a turn waits that is not spare."""
        return any(not spare for spare, _ in self._lines)

    def in_order(self, depth: int, *, spare: bool = False) -> Iterator[Turn]:
        """Up to ``depth`` turns of each tenant, the least served tenant's first; only ``spare`` ones, or all others."""
        tenants = (tenant for kind, tenant in self._lines if kind is spare)
        for tenant in sorted(tenants, key=lambda tenant: self.tokens_served(tenant, spare=spare)):
            yield from list(self._lines[spare, tenant])[:depth]

    def __iter__(self) -> Iterator[Turn]:
        for line in self._lines.values():
            yield from line


def line_of(turn: Turn) -> tuple[bool, str]:
    return turn.spare, turn.request.tenant
