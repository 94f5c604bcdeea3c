"""What an engine tells of itself with each step: gauges and counters.

The server process imports this module too, so it imports no torch.
"""

from __future__ import annotations

import msgspec

from cache.tier import Tier, TierStats


class Stats(msgspec.Struct, frozen=True):
    """Gauges (now) and counters (since the engine started) for ``/metrics``. ``pid``: the engine's process; 0: there is
    none."""

    pid: int = 0
    running: int = 0
    waiting: int = 0
    sessions: int = 0
    tiers: dict[Tier, TierStats] = {}  # those that there are
    reclaimable_pages: int = 0  # of the device: of idle sessions whose KV is on disk too; up to ten seconds old
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    disk_sessions: int = 0
    disk_saves: int = 0  # files written, since the engine started
    disk_written: int = 0  # bytes of them
    disk_read: int = 0
    disk_errors: int = 0  # writes and reads that the file system refused
    disk_failing: int = 0  # 1: it takes no KV now, being full or broken
    disk_damaged: int = 0  # files that failed their checks, at the start or when they were read
    disk_pending: int = 0  # idle sessions whose newest tokens are not on disk yet
    misses: dict[str, int] = {}  # by ``Miss``, since the engine started
    evictions_after: dict[str, int] = {}  # from the device, by ``StopKind``, since the engine started
    hold_seconds: dict[str, float] = {}  # by ``StopKind``: the age past which a tenth of what goes on is to come
    drafted: dict[str, int] = {}  # tokens drafted, by ``DraftSource``, since the engine started
    accepted: dict[str, int] = {}  # drafted tokens that were accepted
    warmed: int = 0  # announced sessions that were brought to the device
    brought_back: int = 0  # pinned ones that were
    media_encoded: int = 0  # encoder passes, since the engine started
    encoder_seconds: float = 0.0  # that these took, or that sounds were heard for
    windows: int = 0  # of sounds that were heard
    pooled: int = 0  # texts and pairs that were embedded or scored

    def tier(self, tier: Tier) -> TierStats:
        """What a tier holds; nothing where there is no such tier."""
        return self.tiers.get(tier, TierStats())
