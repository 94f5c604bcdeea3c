"""``ConversationProcessor``: a processor that takes sounds in conversations only, and writes their marks there."""

from __future__ import annotations

import base64
import inspect
import io
from collections.abc import Sequence
from typing import Any

import torch

from scheduler.extras import install_command
from scheduler.media.processor import NoProcessor, Processed, Processor
from scheduler.media.senses import Sense

_WORD = "Listen."


def speaks_only(processor: Any, sense: Sense) -> bool:
    """Whether a processor takes media of this kind in conversations, and not beside text."""
    return sense.argument not in inspect.signature(type(processor).__call__).parameters


class ConversationProcessor(Processor):
    """What stands for a sound is what a conversation has more with it than without."""

    def __init__(self, processor: Any, sense: Sense, tokenizer: Any) -> None:
        """``tokenizer``: that of the model, which takes the text of special tokens. Raises NoProcessor."""
        super().__init__(processor, sense)
        self._tokenizer = tokenizer
        try:
            self._plain = self._converse([])["input_ids"][0].tolist()
        except Exception as error:  # whatever foreign code raises of what it was not made for
            raise NoProcessor(
                f"its processor needs a library for {sense.noun}s: {install_command('mistral')}"
            ) from error

    def _converse(self, parts: Sequence[dict[str, str]]) -> Any:
        content = [*parts, {"type": "text", "text": _WORD}]
        return self._processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=True, return_dict=True, return_tensors="pt"
        )

    def _process(self, media: Sequence[Any], options: dict[str, Any]) -> Processed:
        made = [self._converse([{"type": self.sense.kind, "base64": self._file(sound)}]) for sound in media]
        ids = [token for one in made for token in self._between(one["input_ids"][0].tolist())]
        text = "".join(self._tokenizer.convert_ids_to_tokens(ids))
        if self._tokenizer.encode(text, add_special_tokens=False) != ids:
            raise ValueError(f"the tokenizer has no text for what stands for a {self.sense.noun}")
        names = [name for name in made[0] if name not in ("input_ids", "attention_mask")]
        return Processed(text, ids, {name: torch.cat([one[name] for one in made]) for name in names})

    def _between(self, ids: list[int]) -> list[int]:
        """What these ids have more than a conversation without sounds."""
        same = next(n for n, pair in enumerate(zip(ids, self._plain, strict=False)) if pair[0] != pair[1])
        return ids[same : len(ids) - (len(self._plain) - same)]

    def _file(self, sound: Any) -> str:
        """A WAV file of samples, in base64."""
        import soundfile

        target = io.BytesIO()
        soundfile.write(target, sound, self.rate, format="WAV", subtype="FLOAT")
        return base64.b64encode(target.getvalue()).decode()
