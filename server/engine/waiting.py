"""Counts the turns that wait in the engine's queue, so that requests can be refused early when it is full."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from contextvars import ContextVar, Token

RECENT = 32  # departures whose times tell how fast the queue moves
REQUEST: ContextVar[str] = ContextVar("request", default="")  # that is being read in this context
LONGEST = 60  # seconds, the most that a client is told to wait


class WaitingTurns:
    """Counts, by tenant, the turns that were sent to the engine and are not yet admitted, and the requests that are
    being read and will become turns. ``capacity`` is that of the engine's queue.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._tenants: dict[str, str] = {}  # turn -> tenant
        self._lines: Counter[str] = Counter()  # tenant -> how many
        self._read: set[str] = set()
        self._left: deque[float] = deque(maxlen=RECENT)  # when turns left the queue, by time.monotonic

    @property
    def reading(self) -> int:
        return len(self._read)

    def read(self, name: str, tenant: str) -> None:
        """Count a request that begins to be read. It is removed when its turn is added, or when it becomes none."""
        self._read.add(name)
        self.add(name, tenant)

    def add(self, turn: str, tenant: str) -> None:
        self._tenants[turn] = tenant
        self._lines[tenant] += 1

    def leave(self, turn: str) -> None:
        """Remove a turn that was admitted or has ended in the queue. Idempotent."""
        if turn in self._tenants:
            self._left.append(time.monotonic())
            self.remove(turn)

    def retry_after(self) -> int:
        """The expected time until the current queue has emptied, at the rate of the last departures: whole seconds, 1
        to ``LONGEST``; 1 while the rate is unknown.
        """
        if len(self._left) < 2:
            return 1
        each = (time.monotonic() - self._left[0]) / len(self._left)  # a queue that has come to a halt counts too
        return min(LONGEST, max(1, math.ceil(len(self._tenants) * each)))

    def remove(self, turn: str) -> None:
        """Remove a turn that was refused, or a request that becomes none. Idempotent."""
        self._read.discard(turn)
        tenant = self._tenants.pop(turn, None)
        if tenant is not None:
            self._lines[tenant] -= 1
            if not self._lines[tenant]:
                del self._lines[tenant]

    def clear(self) -> None:
        """Remove all: the engine has died."""
        self._tenants.clear()
        self._lines.clear()
        self._read.clear()
        self._left.clear()

    def full(self, tenant: str) -> bool:
        """Whether another turn of this tenant would be refused, by the rule of ``scheduler.core.fair_queue``: in a full
        queue, a turn replaces one of a tenant that has more waiting turns than this tenant would then have.
        """
        if len(self._tenants) < self._capacity:
            return False
        return max(self._lines.values()) <= self._lines[tenant] + 1


class RequestReading:
    """A context manager: within it, a request of ``tenant`` is being read and is counted under a ``name`` of its
    own.
    """

    __slots__ = ("_before", "_name", "_tenant", "_waiting")

    def __init__(self, waiting: WaitingTurns, name: str, tenant: str) -> None:
        self._waiting = waiting
        self._name = name
        self._tenant = tenant
        self._before: Token[str] | None = None

    def __enter__(self) -> None:
        self._waiting.read(self._name, self._tenant)
        self._before = REQUEST.set(self._name)

    def __exit__(self, *_: object) -> None:
        assert self._before is not None
        REQUEST.reset(self._before)
        self._waiting.remove(self._name)
