"""``HeadInput``: what a model's output head reads while a forward runs: the last hidden states."""

from __future__ import annotations

from typing import Any

import torch


class HeadInput:
    """Within it the states that the head of ``model`` reads are kept, over all calls."""

    def __init__(self, model: Any) -> None:
        self._head: torch.nn.Module = model.get_output_embeddings()
        self._seen: list[torch.Tensor] = []

    def __enter__(self) -> HeadInput:
        def see(_: torch.nn.Module, given: tuple[Any, ...]) -> None:
            self._seen.append(given[0].reshape(-1, given[0].shape[-1]))

        self._hook = self._head.register_forward_pre_hook(see)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def of(self, keep: torch.Tensor, tokens: int) -> torch.Tensor:
        """The states ``[len(keep), H]`` of the rows ``keep`` of a step with so many tokens, float32. Raises ValueError
        where the head read other rows.
        """
        found = torch.cat(self._seen).float() if self._seen else torch.zeros(0, 1)
        if len(found) == len(keep):
            return found
        if len(found) != tokens:
            raise ValueError("the output head read other rows than those of the step")
        return found[keep]
