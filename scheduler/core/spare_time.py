"""``SpareTime``: how many tokens of turns that nobody waits for may be beside those of others."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.core.turn import Turn

_SHARE = 1 / 16  # of the time that steps of others take
_PIECE = 0.05  # seconds that are saved up before some are spent: what a step is longer by
_DEBT = 1.0  # seconds that are paid back at most
_WEIGHT = 0.2  # of the latest step in what is usual


class SpareTime:
    """Steps in which turns decode that somebody waits for leave a part of the token budget. Spare tokens beside them
    are not free: on a CPU a step with them takes longer. So they may lengthen these steps by a sixteenth, on average;
    what they cost is measured.
    """

    def __init__(self) -> None:
        self._saved = 0.0  # seconds
        self._usual: float | None = None  # seconds of a step without spare tokens in which all others decode
        self._each: float | None = None  # seconds that a spare token costs

    def tokens(self, most: int) -> int:
        """How many spare tokens the next step may feed beside others, up to ``most``."""
        if self._saved < _PIECE or self._usual is None:
            return 0
        return most if not self._each else max(1, min(most, int(self._saved / self._each)))

    def record(self, plan: Iterable[tuple[Turn, int]], seconds: float) -> None:
        """A step of this plan took so long."""
        counts = {True: 0, False: 0}
        prefilled = False
        for turn, count in plan:
            counts[turn.spare] += count
            prefilled |= not turn.spare and count > 1
        if not counts[False]:
            return  # nobody else had the step
        if not counts[True]:
            self._saved = min(2 * _PIECE, self._saved + _SHARE * seconds)
            if not prefilled:
                self._usual = mixed(self._usual, seconds)
        elif self._usual is not None:
            longer = max(0.0, seconds - self._usual)
            self._each = mixed(self._each, longer / counts[True])
            self._saved = max(-_DEBT, self._saved + _SHARE * (seconds - longer) - longer)


def mixed(usual: float | None, latest: float) -> float:
    """What is usual, with the latest measurement."""
    return latest if usual is None else (1 - _WEIGHT) * usual + _WEIGHT * latest
