"""``SideCalls``: how many side calls the conversations of hints had, of those seen last."""

from __future__ import annotations

from collections import OrderedDict

REMEMBERED = 4096  # hints
LINE = "line-"  # how the names of lines begin: LINE, the digest of a hint, a number


class SideCalls:
    """Counts since the start of this server, by the hint's digest, which the names of its lines have too."""

    def __init__(self) -> None:
        self._counts: OrderedDict[tuple[str, str], int] = OrderedDict()

    def add(self, tenant: str, line: str) -> None:
        """Count one, beside the line with this name."""
        hint = tenant, line.rpartition("-")[0]
        self._counts[hint] = self._counts.pop(hint, 0) + 1
        if len(self._counts) > REMEMBERED:
            self._counts.popitem(last=False)

    def beside(self, tenant: str, line: str) -> int:
        return self._counts.get((tenant, line.rpartition("-")[0]), 0)
