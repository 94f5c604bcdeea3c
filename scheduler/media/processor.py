"""``Processor``: a model's own processor of pictures or sounds, from the files beside its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
import transformers

from scheduler.media.senses import PICTURES, VIDEOS, Sense, decode_picture, decode_sound
from scheduler.media.video_frames import decode_video

_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"})


class NoProcessor(Exception):
    """Media cannot be processed; the message says why in one line."""


class Processed(NamedTuple):
    """Media as their model takes them: ``text`` stands for them in a prompt, ``ids`` are its tokens, ``inputs`` are
    arguments of the model.
    """

    text: str
    ids: list[int]
    inputs: dict[str, Any]


class Processor:
    """A processor of transformers. ``mark`` is what a prompt has for a medium before it is expanded."""

    def __init__(self, processor: Any, sense: Sense = PICTURES) -> None:
        """Raises NoProcessor."""
        mark = getattr(processor, sense.mark, None)
        part = next((one for name in sense.parts if (one := getattr(processor, name, None)) is not None), None)
        if not isinstance(mark, str) or part is None:
            raise NoProcessor(f"its processor has no mark for {sense.noun}s")
        self.mark = mark
        self.sense = sense
        self._processor = processor
        self._part: Any = part
        self._tokenizer: Any = processor.tokenizer

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all that a medium's rows depend on besides its bytes and the model."""
        names = {"PIL": "pillow"}
        libraries = (transformers.__version__, *(version(names.get(name, name)) for name in self.sense.libraries))
        told = (type(self._processor).__name__, self._processor.to_json_string(), libraries)
        return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()

    @property
    def added(self) -> frozenset[int]:
        """The tokens that were added to the vocabulary of its tokenizer."""
        return frozenset(self._tokenizer.added_tokens_decoder)

    @property
    def rate(self) -> int:
        """Samples of a sound in a second."""
        return int(self._part.sampling_rate)

    def process(self, data: Sequence[bytes]) -> Processed:
        """Encoded media, one after the other with nothing between. Raises ValueError for bytes that are none, and for a
        sound that is longer than the model hears.
        """
        if self.sense is PICTURES:
            return self._process([decode_picture(one) for one in data], {})
        if self.sense is VIDEOS:
            videos = [decode_video(one) for one in data]
            chosen = {"do_sample_frames": False} if any(one.chosen for one in videos) else {}
            told = [{**one.told, "frames_indices": [*range(len(one.frames))]} for one in videos]
            return self._process([one.frames for one in videos], {"video_metadata": told, **chosen})
        sounds = [decode_sound(one, self.rate) for one in data]
        made = self._process(sounds, {"sampling_rate": self.rate})
        window = int(getattr(self._part, "chunk_length", 0) * self.rate)
        if 0 < window < max(map(len, sounds)):  # some cut it off there without a word, others hear it in pieces
            cut = self._process([sound[:window] for sound in sounds], {"sampling_rate": self.rate})
            if cut.text == made.text:
                raise ValueError(f"the sound is longer than the {window // self.rate} seconds that the model hears")
        return made

    def _process(self, media: Sequence[Any], options: dict[str, Any]) -> Processed:
        given = {self.sense.argument: [*media], "return_tensors": "pt", "return_text_replacement_offsets": True}
        try:
            made = self._processor(text=[self.mark * len(media)], **given, **options)
        except ValueError:
            if len(media) < 2:
                raise
            made = self._processor(text=[self.mark] * len(media), **given, **options)  # some take one in each text
        found = [one for offsets in made.get("text_replacement_offsets") or () for one in offsets]
        if len(found) != len(media):
            raise ValueError(f"the processor does not tell by what text it replaces a {self.sense.noun}")
        text = "".join(one["replacement"] for one in found)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return Processed(text, ids, {name: value for name, value in made.items() if name not in _TEXT})


def to_device(inputs: dict[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Inputs on a device; floating point numbers as ``dtype``."""
    return {name: _move(value, device, dtype) for name, value in inputs.items()}


def _move(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype) if value.is_floating_point() else value.to(device)
    return [_move(one, device, dtype) for one in value] if isinstance(value, list) else value
