"""``RestoreRates``: measured speeds of loading and of computing KV, which decide whether stored KV is loaded or
computed again.
"""

from __future__ import annotations

_KEPT = 0.7  # of what older measurements weigh, with each new one
_HOPE = 0.9  # a refused load makes the next one look that much cheaper, so that a slow disk is tried again some time


class RestoreRates:
    """How fast stored KV comes back, and how fast it could be computed: seconds over bytes and over prompt tokens, of
    what really happened, the newest and the largest weighing most.
    """

    def __init__(self) -> None:
        self._load = _Rate()
        self._compute = _Rate()

    def loaded(self, nbytes: int, seconds: float) -> None:
        """That many bytes were read, verified and put into pages."""
        self._load.add(nbytes, seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """A step that fed that many tokens, most of them of prompts, took so long."""
        self._compute.add(tokens, seconds)

    def prefers_loading(self, nbytes: int, tokens: int) -> bool:
        """Whether ``nbytes`` are sooner read than their ``tokens`` computed. What was never measured is tried."""
        if not self._load.amount or not self._compute.amount:
            return True
        if self._load.of(nbytes) <= self._compute.of(tokens):
            return True
        self._load.seconds *= _HOPE
        return False


class _Rate:
    def __init__(self) -> None:
        self.amount = 0.0
        self.seconds = 0.0

    def add(self, amount: int, seconds: float) -> None:
        self.amount = _KEPT * self.amount + amount
        self.seconds = _KEPT * self.seconds + seconds

    def of(self, amount: int) -> float:
        return amount * self.seconds / self.amount
