"""LongRoPE: two sets of rotary frequencies, of which a timeline's length selects one.

If a timeline is longer than the model's original context all its tokens use the long set, otherwise all use the short
set. transformers selects the set by the largest position of the *forward*. Therefore sessions on different sides of the
threshold cannot share a forward, and the first chunks of a long prompt must be run with the long set although their
positions are small. When a session grows past the threshold its KV is computed again.
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
            module.forward = self._wrap(module.forward)

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

    def _wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
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
