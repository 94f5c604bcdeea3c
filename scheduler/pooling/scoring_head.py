"""``ScoringHead``: what a cross-encoder does behind its layers, on hidden states that are there already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from scheduler.pooling.segments import Unsegmented

PROBE = torch.arange(3, 11)[None]  # token ids of a short input


class ScoringHead:
    """Runs ``model`` of transformers with the hidden states that its layers would give in their place. ``base``: the
    model without its head.
    """

    def __init__(self, model: Any) -> None:
        """Raises Unsegmented for a model whose layers are no module of their own, and what the model raises itself."""
        self.base = model.base_model
        if self.base is model:
            raise Unsegmented("the model has no part that makes its hidden states")
        self._model = model
        self._body, self._kind = layers_of(self.base)

    def __call__(self, hidden: torch.Tensor, given: Mapping[str, torch.Tensor]) -> Any:
        """The model's output for inputs of hidden states ``[B, T, H]``; ``given``: its arguments, ``[B, T]`` each."""
        made = hidden if issubclass(self._kind, torch.Tensor) else self._kind(last_hidden_state=hidden)
        with answering(self._body, made):
            return self._model(**given, return_dict=True)


@torch.inference_mode()
def layers_of(base: Any) -> tuple[nn.Module, type[Any]]:
    """The outermost module that gives the last hidden states and no other tensor, and the type in which it gives them.
    Raises Unsegmented.
    """
    given: list[tuple[nn.Module, Any]] = []
    hooks = [
        one.register_forward_hook(lambda module, _, output: given.append((module, output))) for one in base.modules()
    ]
    try:
        hidden = base(input_ids=PROBE.to(base.device), return_dict=True).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    for module, output in reversed(given):  # an outer module ends behind those in it
        values = [*output.values()] if isinstance(output, dict) else [output]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]  # besides, there may be an empty cache
        if len(tensors) == 1 and tensors[0] is hidden:
            return module, type(output)
    raise Unsegmented("no module of the model gives its hidden states alone")


@contextmanager
def answering(module: nn.Module, output: Any) -> Iterator[None]:
    """Within it the module gives ``output`` and computes nothing."""
    own = vars(module)  # found before the method of its class
    own["forward"] = lambda *args, **others: output
    try:
        yield
    finally:
        del own["forward"]
