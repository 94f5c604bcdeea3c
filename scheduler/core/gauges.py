"""The engine's gauges and counters: ``StepCounters``, and ``read_stats`` and ``RecentStats`` for the server."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cache.inventory import count_reclaimable, tier_stats
from cache.store import SessionStore
from cache.tiers.archive import Archive
from scheduler.core.scheduler import Scheduler
from scheduler.core.speculator import Speculator
from scheduler.engine_stats import Stats
from scheduler.media.media_store import MediaStore
from scheduler.protocol import DraftSource

_LOOK = 10.0  # seconds between two looks at all pages
_RECENT = 0.1  # seconds


@dataclass
class StepCounters:
    """What steps have done since the engine started."""

    steps: int = 0
    prompt_tokens: int = 0  # of admitted turns
    cached_tokens: int = 0  # of these, those that were reused
    generated_tokens: int = 0
    reclaimable_pages: int = 0  # as of ``looked_at``
    looked_at: float = -math.inf  # by time.monotonic

    def look(self, store: SessionStore) -> None:
        """Count the reclaimable pages, which takes a while where there are many."""
        if time.monotonic() - self.looked_at >= _LOOK:
            self.reclaimable_pages, self.looked_at = count_reclaimable(store), time.monotonic()


class RecentStats:
    """Statistics that are read when turns have begun or ended, or nothing runs, and else every ``_RECENT`` seconds:
    reading them takes longer than drawing a token.
    """

    def __init__(self, read: Callable[[], Stats]) -> None:
        self._read, self._stats = read, Stats()
        self._turns, self._at = (-1, -1), -math.inf

    def read(self, scheduler: Scheduler, stalled: bool) -> Stats:
        turns, now = (len(scheduler.running), len(scheduler.waiting)), time.monotonic()
        if stalled or turns != self._turns or now - self._at >= _RECENT:
            self._stats, self._turns, self._at = self._read(), turns, now
        return self._stats


def read_stats(
    counters: StepCounters, scheduler: Scheduler, speculator: Speculator | None, media_store: MediaStore | None
) -> Stats:
    """All gauges, as of now, and all counters."""
    retention = scheduler.store.retention
    counters.look(scheduler.store)
    return Stats(
        pid=os.getpid(),
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        sessions=len(scheduler.store.residency),
        tiers=tier_stats(scheduler.store),
        reclaimable_pages=counters.reclaimable_pages,
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens,
        generated_tokens=counters.generated_tokens,
        steps=counters.steps,
        preemptions=scheduler.preemptions,
        misses={str(reason): count for reason, count in scheduler.misses.items()},
        evictions_after={str(kind): count for kind, count in retention.evictions.items()},
        hold_seconds=retention.hold_seconds(),
        warmed=retention.warmed,
        brought_back=retention.brought_back,
        drafted=_by_name(speculator.drafted) if speculator is not None else {},
        accepted=_by_name(speculator.accepted) if speculator is not None else {},
        media_encoded=media_store.encoded if media_store is not None else 0,
        encoder_seconds=media_store.seconds if media_store is not None else 0.0,
        **disk_gauges(scheduler.store.archive),
    )


def disk_gauges(archive: Archive | None) -> dict[str, int]:
    """By their names in ``Stats``; nothing where there is no disk tier."""
    if archive is None:
        return {}
    return {
        "disk_sessions": len(archive.disk.heads),
        "disk_saves": archive.write_behind.saves,
        "disk_written": archive.write_behind.written,
        "disk_read": archive.loader.read,
        "disk_errors": archive.errors,
        "disk_failing": int(archive.write_behind.fault.is_there),
        "disk_damaged": archive.disk.damaged,
        "disk_pending": archive.write_behind.pending,
    }


def _by_name(counts: Mapping[DraftSource, int]) -> dict[str, int]:
    return {str(source): count for source, count in counts.items()}
