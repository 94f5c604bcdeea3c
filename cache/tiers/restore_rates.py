"""``RestoreRates``: measured speeds of loading and of computing KV, which decide whether stored KV is loaded or
computed again.
"""

from __future__ import annotations

from collections.abc import Sequence

_KEPT = 0.7  # of what older measurements weigh, with each new one
_MIN_PREFILL = 32  # prompt tokens in a step that make its time a measure of prefill
_HOPE = 0.9  # a refused load makes the next one look that much cheaper, so that a slow disk is tried again some time


class RestoreRates:
    """Measured rates of loading (seconds per byte) and of computing (seconds per prompt token), as averages in which
    new and large measurements weigh most.
    """

    def __init__(self) -> None:
        self._load = _Rate()
        self._compute = _Rate()

    def record_load(self, nbytes: int, seconds: float) -> None:
        """Record that ``nbytes`` were read, verified and put into pages in ``seconds``."""
        self._load.add(nbytes, seconds)

    def record_compute(self, tokens: int, seconds: float) -> None:
        """Record that a step fed ``tokens``, most of them of prompts, in ``seconds``."""
        self._compute.add(tokens, seconds)

    def record_step(self, counts: Sequence[int], seconds: float) -> None:
        """Record a step that fed ``counts`` tokens, a count for each session, if prompts are the most of it."""
        prefill = sum(count for count in counts if count > 1)
        if prefill >= _MIN_PREFILL and 2 * prefill > sum(counts):
            self.record_compute(sum(counts), seconds)

    def prefers_loading(self, nbytes: int, tokens: int) -> bool:
        """Whether reading ``nbytes`` is faster than computing their ``tokens``. True until both have been measured."""
        if not self._load.amount or not self._compute.amount:
            return True
        if self._load.of(nbytes) <= self._compute.of(tokens):
            return True
        self._load.seconds *= _HOPE
        return False

    def seconds_per_token(self, token_bytes: int, stored: float) -> float:
        """What it costs to restore a token of ``token_bytes`` if that share of the tokens is ``stored``, and the others
        have to be computed. 1 until both have been measured.
        """
        if not self._load.amount or not self._compute.amount:
            return 1.0
        compute = self._compute.of(1)
        return stored * min(self._load.of(token_bytes), compute) + (1.0 - stored) * compute


class _Rate:
    def __init__(self) -> None:
        self.amount = 0.0
        self.seconds = 0.0

    def add(self, amount: int, seconds: float) -> None:
        self.amount = _KEPT * self.amount + amount
        self.seconds = _KEPT * self.seconds + seconds

    def of(self, amount: int) -> float:
        return amount * self.seconds / self.amount
