"""``Receipt``: what was reused of a turn's prompt, from which tiers, and why not more (``Miss``)."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from cache.tier import StopKind, Tier


class Miss(StrEnum):
    """Why a cached timeline could not be reused up to where the prompt leaves it."""

    EVICTED = "evicted"  # no tier holds it any more
    DAMAGED = "damaged"  # a file of it failed its checks
    CHEAPER = "recompute_cheaper"  # loading would have taken longer than computing
    NO_ROOM = "no_room"  # the device had no pages to load it into
    NO_CHECKPOINT = "no_checkpoint"  # a recurrent state can only go back to a checkpoint
    WINDOW = "window_freed"  # keys that a windowed layer would see there made room for others
    ADAPTER = "other_adapter"  # what is cached of the session was computed with another adapter, or with none
    DIVERGED = "diverged"  # the prompt itself differs from what is cached


class Receipt(msgspec.Struct, frozen=True):
    """What was reused of a turn's prompt: ``cached`` tokens in all. ``loaded``: how many of these came from each tier
    other than the device, if any; ``load_seconds``: the time of reading files.

    ``miss``: why not more was reused, as far as the engine knows. ``expected``: the token id that the longest cached
    timeline of this tenant has at position ``matched``, if the prompt has another one there. ``admitted``: the time of
    admission by ``time.monotonic``, which all processes of a machine share. ``idle``: how long the conversation had
    paused when this turn came, in seconds, and ``after`` what; None if it goes on from no turn that the engine knows.
    Of the ``media`` in the prompt ``encoded`` had to be run through the encoder for this turn.
    """

    prompt: int
    cached: int
    loaded: dict[Tier, int] = {}
    load_seconds: float = 0.0
    miss: Miss | None = None
    matched: int = 0
    expected: int | None = None
    admitted: float | None = None
    after: StopKind | None = None
    idle: float | None = None
    media: int = 0
    encoded: int = 0

    def count_reused(self, tier: Tier) -> int:
        """Tokens of the prompt that were not computed because ``tier`` had them."""
        if tier is Tier.DEVICE:
            return max(0, self.cached - sum(self.loaded.values()))
        return self.loaded.get(tier, 0)
