"""``StepCosts``: what a step costs by the number of tokens that it feeds, measured on the steps that run."""

from __future__ import annotations

from bisect import bisect_left

_SLOPE = 0.1  # of the cost of one token, per further token, until it is measured
_MOST = 64  # tokens that are told apart
_UNIT_WEIGHT, _RATIO_WEIGHT = 0.3, 0.1
_BOUNDS = 0.5, 2.0  # of a ratio to what was expected: beyond them something else took the time


class StepCosts:
    """The cost of a step of some tokens, as a multiple of a step of one token. Histories grow and other programs come
    and go, so two things are followed: the time of a unit, quickly, and the ratios to it, slowly. Between numbers of
    tokens that were measured the cost is interpolated.
    """

    def __init__(self) -> None:
        self._unit = 0.0  # seconds of a step of one token; 0: not measured
        self._ratios: dict[int, tuple[float, int]] = {1: (1.0, 1)}  # tokens -> ratio, times measured
        self._known = [1]  # its keys, ascending

    @property
    def unit(self) -> float:
        """Seconds of a step of one token; 0: not measured."""
        return self._unit

    def relative(self, tokens: int) -> float:
        """The cost of a step that feeds ``tokens``."""
        at = bisect_left(self._known, tokens)
        if at < len(self._known) and self._known[at] == tokens:
            return self._ratios[tokens][0]
        low = self._known[max(0, at - 1)]
        cost = self._ratios[low][0]
        if at < len(self._known):
            high = self._known[at]
            return cost + (self._ratios[high][0] - cost) * (tokens - low) / (high - low)
        slope = (cost - 1) / (low - 1) if low > 1 else _SLOPE
        return cost + slope * (tokens - low)

    def record(self, tokens: int, seconds: float) -> None:
        """A step that fed ``tokens`` took ``seconds``."""
        if not 1 <= tokens <= _MOST or seconds <= 0:
            return
        expected = self.relative(tokens)
        if self._unit and tokens > 1:
            ratio = min(max(seconds / self._unit, expected * _BOUNDS[0]), expected * _BOUNDS[1])
            before, times = self._ratios.get(tokens, (expected, 0))
            weight = max(_RATIO_WEIGHT, 1 / (times + 1))
            if not times:
                self._known.insert(bisect_left(self._known, tokens), tokens)
            self._ratios[tokens] = max(1.0, before + weight * (ratio - before)), times + 1
        unit = seconds / self.relative(tokens)
        self._unit = unit if not self._unit else self._unit + _UNIT_WEIGHT * (unit - self._unit)
