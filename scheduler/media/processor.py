"""``Processor``: a model's own processor of pictures or sounds, from the files beside its weights."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoProcessor, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from cache.error_line import first_line
from scheduler.extras import install_command
from scheduler.media.senses import PICTURES, SOUNDS, VIDEOS, Sense, decode_picture, decode_sound
from scheduler.media.video_frames import decode_video

_PART = re.compile("(video|image)_processor$")
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
        return frozenset(self._processor.tokenizer.added_tokens_decoder)

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
        ids: list[int] = self._processor.tokenizer.encode(text, add_special_tokens=False)
        return Processed(text, ids, {name: value for name, value in made.items() if name not in _TEXT})


def read_processor(model: str, settings: Any, sense: Sense = PICTURES) -> Processor:
    """The processor of a hub id or folder with this configuration. Raises NoProcessor."""
    if not sense.is_there:
        raise NoProcessor(f"{sense.noun}s need a library: {install_command('media')}")
    readers: list[Callable[[], Any]] = [lambda: AutoProcessor.from_pretrained(model)]
    if sense is not VIDEOS:
        readers.append(lambda: _without(("video",), _class_of(model, settings)).from_pretrained(model))
    if sense is SOUNDS:
        readers.append(lambda: _without(("video", "image"), _class_of(model, settings)).from_pretrained(model))
    reason = "none can be loaded"
    for read in readers:
        try:
            return Processor(read(), sense)
        except Exception as error:  # whatever a reader of foreign files raises
            reason = reason if read is not readers[0] else first_line(error, 160)
    raise NoProcessor(f"its processor cannot be loaded: {reason}")


def _class_of(model: str, settings: Any) -> Any:
    """The class of the processor of a model, as its configuration or its own files name it."""
    if type(settings) in PROCESSOR_MAPPING:
        return PROCESSOR_MAPPING[type(settings)]
    named, _ = ProcessorMixin.get_processor_dict(model)
    return getattr(transformers, named["processor_class"])


def _without(kinds: Sequence[str], kind: Any) -> Any:
    """The class of a processor, for all but media of these kinds: what prepares them may need torchvision."""
    parts = kind.get_attributes()
    names = [name for name in parts if not any(one in name for one in kinds)]
    members: dict[str, Any] = {"get_attributes": classmethod(lambda cls: names)}
    wanted = inspect.signature(kind.__init__).parameters
    if all(wanted[name].default is not inspect.Parameter.empty for name in parts if name not in names):
        return type(kind.__name__, (kind,), members)

    def read(cls: Any, *given: Any, **options: Any) -> list[Any]:
        """The parts of a processor, and None for those that it must be told and does not have."""
        found = dict(zip(names, kind._get_arguments_from_pretrained.__func__(cls, *given, **options), strict=True))
        return [found.get(name) for name in parts]

    return type(kind.__name__, (kind, _Lenient), {**members, "_get_arguments_from_pretrained": classmethod(read)})


class _Lenient(ProcessorMixin):  # type: ignore[misc]
    """A processor that is told that it has no part for some kinds of media."""

    def __init__(self, *parts: Any, **settings: Any) -> None:
        there = [one for one in parts if one is not None]
        own = {*self.get_attributes()}  # of others, None is a setting like any other
        lacking = {name for name, one in settings.items() if one is None and name not in own and _PART.search(name)}
        super().__init__(*there, **{name: one for name, one in settings.items() if name not in lacking})


def to_device(inputs: dict[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Inputs on a device; floating point numbers as ``dtype``."""
    return {name: _move(value, device, dtype) for name, value in inputs.items()}


def _move(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype) if value.is_floating_point() else value.to(device)
    return [_move(one, device, dtype) for one in value] if isinstance(value, list) else value
