"""Think time: the gaps between the end of a turn and the next request of the same conversation, as small histograms
that are learned per tenant and per tool.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from cache.tier import StopKind

_FIRST = 0.25  # seconds: the end of the first bin
_PER_OCTAVE = 2  # bins in which a gap doubles
_BINS = 40  # the last one ends at about two days; longer gaps and conversations that ended are behind it
_PRIOR = 16.0  # observations that a prior counts for
_MEMORY = 1.0 - 1.0 / 128  # what older observations weigh with each new one
_TENANTS = 256
_TOOLS = 32  # per tenant


def _end(at: int) -> float:
    return float(_FIRST * 2.0 ** (at / _PER_OCTAVE))


_EDGES = tuple(_end(at) for at in range(_BINS))  # seconds: the upper ends of the bins


def _bin(seconds: float) -> int:
    """The bin of a gap; ``_BINS`` if it is longer than all."""
    if seconds <= _FIRST:
        return 0
    return min(_BINS, math.ceil(_PER_OCTAVE * math.log2(seconds / _FIRST)))


class GapHistogram:
    """Gaps in logarithmic bins; older ones weigh less. A last bin has the conversations that did not go on."""

    def __init__(self, weights: Sequence[float]) -> None:
        """``weights``: one per bin, and one for "later or never"."""
        self._weights = array("d", weights)
        self._rates: array[float] | None = None  # per second, by the bin of the age
        self._news = 0  # observations since the rates were computed
        self._late: float | None = None

    @property
    def weight(self) -> float:
        """How many observations it is worth, older ones counting less, and its prior."""
        return sum(self._weights)

    @property
    def returning(self) -> float:
        """The share of conversations that go on within two days."""
        return 1.0 - self._weights[_BINS] / self.weight

    def copy(self) -> GapHistogram:
        """A histogram of the same shape that is worth no more than a prior."""
        scale = min(1.0, _PRIOR / self.weight)
        return GapHistogram([scale * weight for weight in self._weights])

    def observe(self, gap: float) -> None:
        """A conversation went on after ``gap`` seconds."""
        self._decay()
        self._weights[_bin(gap)] += 1.0

    def observe_longer(self, age: float) -> None:
        """A conversation had not gone on after ``age`` seconds, and what comes later is not seen. It counts for the
        longer gaps, in proportion to what is known of them.
        """
        self._decay()
        first = min(_bin(age) + 1, _BINS)
        rest = sum(self._weights[first:])
        for at in range(first, _BINS + 1):
            self._weights[at] += self._weights[at] / rest if rest else float(at == _BINS)

    def quantile(self, share: float) -> float:
        """The gap in seconds within which that share of those go on that do, to the end of its bin."""
        wanted = share * sum(self._weights[:_BINS])
        for weight, end in zip(self._weights, _EDGES, strict=False):
            wanted -= weight
            if wanted <= 1e-9:
                return end
        return _EDGES[-1]

    @property
    def late(self) -> float:
        """The gap that one of ten exceeds, in seconds."""
        self._refresh()
        assert self._late is not None
        return self._late

    def rate(self, age: float) -> float:
        """How many returns each second of holding a conversation of that ``age`` (seconds since its turn ended) gives,
        if it is held for the time for which that is most: its Gittins index.
        """
        at = _bin(age)
        if at >= _BINS:
            at = _BINS - 1
        return self._refresh()[at]

    def _decay(self) -> None:
        for at in range(_BINS + 1):
            self._weights[at] *= _MEMORY
        self._news += 1

    def _refresh(self) -> array[float]:
        """The rates, computed again once enough has been observed."""
        if self._rates is None or self._news * 16 >= self.weight:
            self._rates, self._news, self._late = _rates(self._weights), 0, self.quantile(0.9)
        return self._rates


def _rates(weights: Sequence[float]) -> array[float]:
    """For each bin as the age: the largest ratio of returns to seconds held over all later ends of holding. The points
    (seconds held, returns) of these ends are added from the last bin to the first; the largest slope from a point is to
    the next corner of their upper hull.
    """
    left = sum(weights)
    points = [(0.0, 0.0)]
    begin = 0.0
    for weight, end in zip(weights, _EDGES, strict=False):
        seconds, returns = points[-1]
        points.append((seconds + (left - weight / 2) * (end - begin), returns + weight))
        left, begin = left - weight, end
    rates = array("d", bytes(8 * _BINS))
    hull = [points[_BINS]]
    for at in range(_BINS - 1, -1, -1):
        point = points[at]
        while len(hull) > 1 and _slope(point, hull[-1]) <= _slope(point, hull[-2]):
            hull.pop()
        rates[at] = _slope(point, hull[-1])
        hull.append(point)
    return rates


def _slope(one: tuple[float, float], other: tuple[float, float]) -> float:
    return (other[1] - one[1]) / max(other[0] - one[0], 1e-9)


def prior(*quantiles: tuple[float, float], returning: float) -> GapHistogram:
    """A histogram of a published distribution: pairs of a share and the seconds within which that share goes on, of
    those that do (the last share is 1); ``returning``: the share that goes on at all.
    """
    points = [(0.0, _FIRST / 4), *quantiles]
    weights = [0.0] * (_BINS + 1)
    below = 0.0
    for at, end in enumerate(_EDGES):
        upto = 1.0
        for (share, seconds), (more, later) in pairwise(points):
            if seconds <= end < later:
                upto = share + (more - share) * math.log(end / seconds) / math.log(later / seconds)
        weights[at] = _PRIOR * returning * (upto - below)
        below = upto
    weights[_BINS] = _PRIOR * (1.0 - returning)
    return GapHistogram(weights)


# Tools and answers: TraceLab (arXiv 2606.30560), 4,265 sessions of coding agents; a session has 9.2 answers. The
# shortest gaps after an answer, and the others, are assumptions that the first observations correct.
_PERSON = ((0.01, 1.0), (0.1, 6.0), (0.5, 84.0), (0.9, 1236.0), (0.99, 50040.0), (1.0, 172800.0))
PRIORS = {
    StopKind.TOOL: prior((0.5, 0.3), (0.9, 13.6), (0.99, 300.0), (1.0, 3600.0), returning=0.99),
    StopKind.ANSWER: prior(*_PERSON, returning=0.89),
    StopKind.WARM_UP: prior((0.5, 2.0), (0.9, 60.0), (0.99, 600.0), (1.0, 3600.0), returning=0.8),
    StopKind.SIDE: prior(*_PERSON, returning=0.02),
}


class TenantGaps:
    """The histograms of one tenant: one per kind of stop, and one for each of its newest tools."""

    def __init__(self) -> None:
        self.kinds = {kind: known.copy() for kind, known in PRIORS.items()}
        self._tools: OrderedDict[str, GapHistogram] = OrderedDict()  # least recently called first

    def tool(self, name: str) -> GapHistogram:
        """The histogram of a tool; a new one begins with what is known of the tenant's tools."""
        found = self._tools.pop(name, None) or self.kinds[StopKind.TOOL].copy()
        self._tools[name] = found
        while len(self._tools) > _TOOLS:
            self._tools.popitem(last=False)
        return found


class ThinkTimes:
    """The gaps of all tenants, at most ``_TENANTS`` of them; one that returns after others have taken its place begins
    with the priors.
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, TenantGaps] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._tenants)

    def of(self, tenant: str) -> TenantGaps:
        found = self._tenants.pop(tenant, None) or TenantGaps()
        self._tenants[tenant] = found
        while len(self._tenants) > _TENANTS:
            self._tenants.popitem(last=False)
        return found
