"""``PoolingQueue``: inputs that wait to be embedded or scored, in an order that is fair between tenants."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field

import torch

from scheduler.pooling_messages import Pool, PoolInput

BYTES_EACH = 4  # of a token id

Line = tuple[bool, str]  # spare, tenant


@dataclass
class PoolingRequest:
    """One request. ``rows`` has the vectors of the inputs that are done; inputs before ``taken`` are, or are in the
    step that runs.
    """

    message: Pool
    taken: int = 0
    rows: list[torch.Tensor | None] = field(default_factory=list)
    missing: int = 0

    def __post_init__(self) -> None:
        self.rows = [None] * len(self.message.inputs)
        self.missing = len(self.rows)

    def keep(self, place: int, row: torch.Tensor) -> None:
        """The vector ``row [width]`` of the input at this place is there."""
        assert self.rows[place] is None, "an input was computed twice"
        self.rows[place] = row
        self.missing -= 1

    @property
    def waits(self) -> bool:
        """Whether an input of it has not been taken yet."""
        return self.taken < len(self.rows)


class PoolingQueue:
    """Requests are served in their order for each tenant, one input after the other; between tenants, the one with the
    fewest tokens so far goes first. Spare requests stand in lines of their own, behind all others. A tenant that
    becomes active again gains nothing by having been idle: its count is raised to the lowest of the others (as
    ``scheduler.core.fair_queue`` has it).
    """

    def __init__(self, capacity: int) -> None:
        """``capacity``: requests that may wait."""
        self._capacity = capacity
        self._lines: defaultdict[Line, OrderedDict[str, PoolingRequest]] = defaultdict(OrderedDict)
        self._served: dict[Line, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def add(self, message: Pool) -> bool:
        """Line up a request; False if there is no room."""
        if len(self) >= self._capacity:
            return False
        line = message.spare, message.tenant
        if line not in self._lines:
            others = (self._served[other] for other in self._lines if other[0] is message.spare)
            self._served[line] = max(self._served.get(line, 0), min(others, default=0))
        self._lines[line][message.request] = PoolingRequest(message)
        return True

    def drop(self, request: str) -> None:
        """Forget a request whose inputs are all taken, which failed, or whose client left. Idempotent."""
        for place, line in [*self._lines.items()]:
            if line.pop(request, None) is not None and not line:
                del self._lines[place]

    def take(self, budget: int) -> list[tuple[PoolingRequest, int]]:
        """The next inputs of together at most ``budget`` tokens, but at least one: requests and places in them."""
        taken: list[tuple[PoolingRequest, int]] = []
        waiting = {
            line: [request for request in requests.values() if request.waits] for line, requests in self._lines.items()
        }
        waiting = {line: requests for line, requests in waiting.items() if requests}
        while waiting:
            line = min(waiting, key=lambda line: (line[0], self._served[line]))
            request = waiting[line][0]
            size = tokens_of(request.message.inputs[request.taken])
            if taken and size > budget:
                break
            taken.append((request, request.taken))
            request.taken += 1
            budget -= size
            self._served[line] += size
            if not request.waits:
                waiting[line].pop(0)
                if not waiting[line]:
                    del waiting[line]
        return taken


def tokens_of(one: PoolInput) -> int:
    return len(one.ids) // BYTES_EACH
