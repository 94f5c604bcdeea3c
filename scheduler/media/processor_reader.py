"""Reading a model's own processor from the files beside its weights."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import transformers
from transformers import AutoProcessor, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from cache.error_line import first_line
from scheduler.extras import install_command
from scheduler.media.conversation_processor import ConversationProcessor, speaks_only
from scheduler.media.processor import NoProcessor, Processor
from scheduler.media.senses import SOUNDS, VIDEOS, Sense

_PART = re.compile("(video|image)_processor$")


def read_processor(model: str, settings: Any, sense: Sense, tokenizer: Any) -> Processor:
    """The processor of a hub id or folder with this configuration. ``tokenizer``: that of the model.
    Raises NoProcessor.
    """
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
            made = read()
            if speaks_only(made, sense):
                return ConversationProcessor(made, sense, tokenizer)
            return Processor(made, sense)
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
