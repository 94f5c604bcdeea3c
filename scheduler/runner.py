"""The model runner: turns of a step in, logits out. The only caller of the model, the only place a cache
length changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cache.packed import PackedStep
from cache.session import SessionCache
from cache.tier import MemoryTier
from scheduler.modes import Mode


class ModelRunner:
    """Runs steps in one mode over the pages of one device tier."""

    def __init__(self, mode: Mode, tier: MemoryTier) -> None:
        self.mode = mode
        self.tier = tier

    @torch.inference_mode()
    def run(self, work: Sequence[tuple[SessionCache, int]], rows: Sequence[int]) -> torch.Tensor:
        """Feed ``count`` tokens of each session; the logits ``[len(rows), V]`` float32 of the packed rows in ``rows``.

        The sessions' pages must be reserved. Lengths grow only if the forward returns. With no rows, ``[0, V]``.
        """
        step = PackedStep(work, self.tier)
        keep = torch.tensor(list(rows) or [0], device=self.tier.device)
        logits = self.mode.forward(step, keep).float()
        for session, count in work:
            session.fed(count)
        return logits[: len(rows)]
