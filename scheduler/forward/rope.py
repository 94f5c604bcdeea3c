"""Positions whose meaning depends on the length of the timeline: LongRoPE has two sets of frequencies.

A timeline longer than the length that the model was first trained on is turned with the long set, all of it; a
shorter one with the short set. transformers picks the set by the largest position of the *forward*, so
sessions on the two sides of the threshold may not share one, and a chunk of a long prompt must be run as long
although its own positions are small. A session that grows past the threshold has keys of the wrong kind: it is
computed once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class LongRope:
    """The threshold of one model, and its rotary modules.

    ``threshold`` is the longest timeline, in tokens, on the short side; None where the model has no such positions.
    """

    def __init__(self, model: Any) -> None:
        self._forced = False
        self._modules = [m for m in model.modules() if _kind(m) == "longrope"]
        lengths = [int(m.config.rope_parameters["original_max_position_embeddings"]) for m in self._modules]
        self.threshold: int | None = min(lengths, default=None)
        for module in self._modules:
            module.forward = self._wrapped(module.forward)

    def remove(self) -> None:
        """The rotary modules are as they were."""
        for module in self._modules:
            del module.forward

    @contextmanager
    def side(self, long: bool) -> Iterator[None]:
        """Within it, every forward is one of the long side, or of the short one."""
        self._forced = long and self.threshold is not None
        try:
            yield
        finally:
            self._forced = False

    def _wrapped(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def rotary(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._forced:
                return forward(x, position_ids, *args, **kwargs)
            # One more position, the first past the short side, decides for the long set; its row is dropped again.
            beyond = position_ids.new_full((position_ids.shape[0], 1), self.threshold or 0)
            out = forward(x, torch.cat([position_ids, beyond], -1), *args, **kwargs)
            return tuple(part[:, :-1] for part in out)

        return rotary


def _kind(module: torch.nn.Module) -> str | None:
    kind = getattr(module, "rope_type", None)
    return kind if isinstance(kind, str) else None
