"""The names of the tiers, and the structs that report what a tier holds. Both processes import this module; it imports
nothing of this project.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Tier(StrEnum):
    """Where KV can lie, nearest to the model first. Metrics, receipts, the API and the page show every member."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"

    @property
    def paged(self) -> bool:
        """Whether it is memory, which is counted in pages; the other tiers hold files, which are counted in bytes."""
        return self in (Tier.DEVICE, Tier.HOST)


class TierStats(msgspec.Struct, frozen=True):
    """What a tier holds now, and what has left it since the engine started.

    ``used`` and ``capacity`` are pages where the tier is ``paged``, else bytes. ``capacity`` 0: there is no such tier,
    or it has no limit. ``evictions`` are sessions that had to make room.
    """

    used: int = 0
    capacity: int = 0
    evictions: int = 0


class TierHolding(msgspec.Struct, frozen=True):
    """What one tier holds of a session: tokens from its beginning, and the bytes that they take there."""

    tokens: int
    bytes: int
