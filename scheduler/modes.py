"""How a model is run: the modes of design section 5. Which one fits is measured at load, see ``probe``."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from cache.attention import PackedAttention, Unsupported
from cache.layers import Layer
from cache.packed import PackedCache, PackedStep


class Mode(ABC):
    """A way to run one step through unmodified modeling code.

    ``in_place`` are the layers whose K/V the attention function reads where they lie; the probe fills it.
    """

    name: ClassVar[str]

    def __init__(self, model: Any, layers: list[Layer]) -> None:
        self.model = model
        self.layers = layers
        self.in_place: frozenset[int] = frozenset()

    @abstractmethod
    def install(self) -> None:
        """Prepare the model; raises ``Unsupported`` where it refuses."""

    @abstractmethod
    def remove(self) -> None:
        """Leave the model as it was."""

    @abstractmethod
    def forward(self, step: PackedStep, keep: torch.Tensor) -> torch.Tensor:
        """Feed the step; returns the logits ``[len(keep), V]`` of the rows ``keep`` (indices into the packed row)."""

    @abstractmethod
    def learn(self) -> None:
        """After a step that was seen to be right: take the short cuts that it has shown to be safe."""


class PackedMode(Mode):
    """One forward ``[1, T]`` for all sessions: our cache, our attention function, explicit positions, no mask."""

    name = "packed"

    def __init__(self, model: Any, layers: list[Layer]) -> None:
        super().__init__(model, layers)
        self.attention = PackedAttention(layers)
        self._decoder = language_model(model)
        self._previous = self._decoder.config._attn_implementation
        self._accepts = inspect.signature(model.forward).parameters
        self._open = any(p.kind is p.VAR_KEYWORD for p in self._accepts.values())

    def install(self) -> None:
        """Switch the language model to our attention function."""
        if "past_key_values" not in self._accepts:
            raise Unsupported("the model's forward takes no past_key_values")
        if "position_ids" not in self._accepts and not self._open:
            raise Unsupported("the model's forward takes no position_ids")
        self._decoder.set_attn_implementation(self.attention.name)
        if self._decoder.config._attn_implementation != self.attention.name:
            raise Unsupported("the model does not let its attention function be chosen")

    def remove(self) -> None:
        """Back to the attention function that the model was loaded with."""
        self._decoder.set_attn_implementation(self._previous)

    def forward(self, step: PackedStep, keep: torch.Tensor) -> torch.Tensor:
        """See ``Mode.forward``. The lm_head runs only on ``keep`` where the model has ``logits_to_keep``."""
        inputs: dict[str, Any] = {"position_ids": step.positions, "use_cache": True, "return_dict": True}
        if "logits_to_keep" in self._accepts:
            inputs["logits_to_keep"] = keep
        cache = PackedCache(self.layers, step, self.in_place)
        with self.attention.running(step):
            logits: torch.Tensor = self.model(input_ids=step.token_ids, past_key_values=cache, **inputs).logits[0]
        return logits if logits.shape[0] == len(keep) else logits[keep]

    def learn(self) -> None:
        """Layers that handed on exactly what the cache gave them may read their pages in place."""
        stored = {i for i, layer in enumerate(self.layers) if layer.stores}
        self.in_place = frozenset(stored - self.attention.transformed)


MODES: tuple[type[Mode], ...] = (PackedMode,)


def language_model(model: Any) -> Any:
    """The sub-module that holds the text decoder: the model itself, or the language model inside a multimodal
    wrapper.
    """
    text = model.config.get_text_config(decoder=True)
    if text is model.config:
        return model
    inside = (
        m for m in model.modules() if getattr(m, "config", None) is text and hasattr(m, "set_attn_implementation")
    )
    return next(inside, model)


@contextmanager
def installed(mode: Mode) -> Iterator[Mode]:
    """``mode`` installed within the block, removed again if the block raises."""
    mode.install()
    try:
        yield mode
    except BaseException:
        mode.remove()
        raise
