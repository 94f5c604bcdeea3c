"""The names of the tiers and of the ends of turns, and the structs that report what a tier holds. Both processes import
this module; it imports nothing of this project.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Tier(StrEnum):
    """A tier of the KV cache; members are in order, nearest to the model first. Metrics, receipts, the API and the page
    at ``/ui`` show all members.
    """

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"

    @property
    def paged(self) -> bool:
        """Whether it is memory, measured in pages; the other tiers hold files and are measured in bytes."""
        return self in (Tier.DEVICE, Tier.HOST)


class StopKind(StrEnum):
    """What the end of a turn makes likely to come next in its conversation. Metrics show all members."""

    TOOL = "tool"  # it called tools: the client sends their results
    ANSWER = "answer"  # it answered: a person reads it
    WARM_UP = "warm_up"  # it generated at most one token, or the client has announced itself
    SIDE = "side"  # it was beside a conversation, or the conversation has gone on elsewhere


class TierStats(msgspec.Struct, frozen=True):
    """What a tier holds now, and how many sessions were evicted from it since the engine started.

    ``used`` and ``capacity`` are pages if the tier is ``paged``, else bytes. ``capacity`` 0: there is no such tier, or
    it has no limit. ``evictions`` are sessions.
    """

    used: int = 0
    capacity: int = 0
    evictions: int = 0


class TierHolding(msgspec.Struct, frozen=True):
    """What one tier holds of a session: ``tokens`` from the beginning of its timeline, and their size there in
    ``bytes``.
    """

    tokens: int
    bytes: int
