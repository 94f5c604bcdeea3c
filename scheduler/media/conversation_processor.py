"""``ConversationProcessor``: a processor of sounds that takes these in conversations only, and leaves it to its
tokenizer to count their placeholders. Here each sound gets as many as the model's encoder makes rows of its features.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from scheduler.media.processor import NoProcessor, Processed, Processor, to_device
from scheduler.media.senses import Sense

_ENCODE = "get_audio_features"
_FEATURES = "input_features"


def speaks_only(processor: Any, sense: Sense) -> bool:
    """Whether a processor takes media of this kind in conversations, and not beside text."""
    return sense.argument not in inspect.signature(type(processor).__call__).parameters


class ConversationProcessor(Processor):
    """Its features are chunks ``[chunks, bands, frames]``, of which the encoder makes the same number of rows each."""

    _rows = 0  # of a chunk

    def prepare(self, model: Any) -> None:
        """See ``Processor.prepare``."""
        if not hasattr(type(model), _ENCODE):
            raise NoProcessor("its processor takes sounds in conversations, and its encoder cannot be run by itself")
        one, two = (self._count(model, np.zeros(round(seconds * self.rate), np.float32)) for seconds in (1, 59))
        if one[1] % one[0] or two[1] * one[0] != one[1] * two[0]:
            raise NoProcessor(
                "its processor takes sounds in conversations, and its encoder makes rows of no fixed number"
            )
        self._rows = one[1] // one[0]

    def _count(self, model: Any, sound: Any) -> tuple[int, int]:
        """Chunks of a sound, and rows that the encoder makes of them."""
        features = self._features([sound])
        with torch.inference_mode():
            made = getattr(model, _ENCODE)(**to_device(features, model.device, model.dtype), return_dict=True)
        return len(features[_FEATURES]), made["pooler_output"].reshape(-1, made["pooler_output"].shape[-1]).shape[0]

    def _process(self, media: Sequence[Any], options: dict[str, Any]) -> Processed:
        chunks = [self._features([sound])[_FEATURES] for sound in media]
        text = self.mark * (self._rows * sum(map(len, chunks)))
        ids: list[int] = self._processor.tokenizer.encode(text, add_special_tokens=False)
        return Processed(text, ids, {_FEATURES: torch.cat(chunks)})

    def _features(self, sounds: Sequence[Any]) -> dict[str, torch.Tensor]:
        speaking = copy.copy(self._processor)
        speaking.tokenizer = _Heard(sounds)
        made = speaking.apply_chat_template([{"role": "user", "content": []}], return_tensors="pt")
        return {_FEATURES: made[_FEATURES]}


class _Heard:
    """In the place of a tokenizer that has read a conversation: it gives the sounds out."""

    def __init__(self, sounds: Sequence[Any]) -> None:
        self._sounds = sounds
        self.init_kwargs: dict[str, Any] = {}  # a processor looks for options there

    def apply_chat_template(self, conversations: Any, **options: Any) -> dict[str, Any]:
        return {"audio": [*self._sounds]}
