"""Counters and histograms: plain numbers while counting, Prometheus families when read.

prometheus-client's counters take a lock and a linear search per observation, as they support threads. These are used on
the event loop only, with one observation per token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily


class Counter:
    """A counter, one number per combination of labels. ``known``: values of its one label that are shown as 0 from the
    start, so that their first increase is visible.
    """

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), known: Sequence[str] = ()) -> None:
        self._head = name, text
        self._labels = labels
        self._values: dict[tuple[str, ...], float] = {(value,): 0.0 for value in known}
        if not labels:
            self._values[()] = 0.0

    def add(self, amount: float, *labels: str) -> None:
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def family(self) -> CounterMetricFamily:
        """The Prometheus family, with the current values."""
        family = CounterMetricFamily(*self._head, labels=self._labels)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        return family


class Histogram:
    """A histogram. ``bounds`` are the buckets' upper ends, ascending; a last bucket has all larger values. With a
    ``label`` there is one histogram for each of its ``known`` values.
    """

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], label: str | None = None, known: Sequence[str] = ()
    ) -> None:
        self._head = name, text
        self._bounds = bounds
        self._label = label
        self._counts = {value: [0] * (len(bounds) + 1) for value in (("",) if label is None else known)}
        self._sums = dict.fromkeys(self._counts, 0.0)

    def observe(self, value: float, of: str = "") -> None:
        """Count one value; ``of``: the label's value."""
        self._counts[of][bisect_left(self._bounds, value)] += 1
        self._sums[of] += value

    def family(self) -> HistogramMetricFamily:
        """The Prometheus family, with cumulative buckets."""
        family = HistogramMetricFamily(*self._head, labels=() if self._label is None else (self._label,))
        for of, counts in self._counts.items():
            buckets, below = [], 0
            for bound, count in zip((*self._bounds, float("inf")), counts, strict=True):
                below += count
                buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(below)))
            family.add_metric(() if self._label is None else (of,), buckets, self._sums[of])
        return family
