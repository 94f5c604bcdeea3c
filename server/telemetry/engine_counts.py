"""What the engines of one model have counted, each from zero, as sums that never decrease."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from cache.tier import Tier
from scheduler.engine_stats import Stats


class EngineCounts:
    """The statistics of the engine that runs, and sums over it and all that ran before."""

    def __init__(self) -> None:
        self.stats = Stats()
        self._last = 0  # process id of the last engine
        self._before: defaultdict[str, float] = defaultdict(float)  # by names in ``Stats``
        self._before_by: defaultdict[tuple[str, str], float] = defaultdict(float)  # and by keys of its tables

    def update(self, stats: Stats) -> bool:
        """Take the newest statistics; True where they are the first of an engine that replaces another. Must be called
        often, as counts of a dead engine since the last call are lost.
        """
        if stats.pid != self.stats.pid:
            self._keep()
        replaced = stats.pid != 0 and self._last not in (0, stats.pid)
        self._last, self.stats = stats.pid or self._last, stats
        return replaced

    def unload(self) -> None:
        """The engine was ended because its model was unloaded: the next one replaces none."""
        self.update(Stats())
        self._last = 0

    def total(self, field: str) -> float:
        now: float = getattr(self.stats, field)
        return self._before[field] + now

    def total_of(self, field: str, key: str) -> float:
        """The sum of the counter ``key`` in a table of ``Stats``."""
        now: dict[str, float] = getattr(self.stats, field)
        return self._before_by[field, key] + now.get(key, 0)

    def evictions(self, tier: Tier) -> float:
        return self._before_by["tiers", tier] + self.stats.tier(tier).evictions

    def _keep(self) -> None:
        """Add what the engine that has ended counted. Gauges are added too, and never read."""
        for field, value in msgspec.structs.asdict(self.stats).items():
            if not isinstance(value, dict):
                self._before[field] += value
                continue
            for key, count in value.items():
                self._before_by[field, key] += count.evictions if field == "tiers" else count
