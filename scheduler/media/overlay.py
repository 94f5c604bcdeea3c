"""``Overlay``: rows of media in the place of what a model embeds, for models that need token ids beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Rows = Sequence[tuple[torch.Tensor, torch.Tensor]]  # where they stand, bool [1, T], and the rows [n, width]


class Overlay:
    """Rows that are written over what a model embeds next, once."""

    def __init__(self) -> None:
        self._hook: Any = None

    def over(self, embed: torch.nn.Module, rows: Rows) -> None:
        """Write ``rows`` over what ``embed`` returns the next time, and forget those that were not used."""
        self.forget()
        self._hook = embed.register_forward_hook(lambda module, args, made: self._write(made, rows))

    def forget(self) -> None:
        """Write nothing."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _write(self, made: torch.Tensor, rows: Rows) -> torch.Tensor:
        self.forget()
        fits = all(marked.shape == made.shape[:2] for marked, _ in rows)  # else it was a forward that failed
        return laid_rows(made, rows) if fits else made


def laid_rows(embedded: torch.Tensor, rows: Rows) -> torch.Tensor:
    """``[1, T, width]`` with rows at the tokens that are marked."""
    embedded = embedded.clone()
    for marked, part in rows:
        embedded[marked] = part.to(embedded)
    return embedded
