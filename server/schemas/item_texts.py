"""The parts of items: what a client said and showed, what the model said or thought, with its log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from server.media.media import Media, PlacedMedia, interleave
from server.schemas.media_parts import join_parts

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(msgspec.Struct, frozen=True, tag_field="type", tag="input_text"):
    """What a client said."""

    text: str


class InputImage(msgspec.Struct, frozen=True, tag_field="type", tag="input_image"):
    """A picture. ``image_url``: where this server gives it out, a path; it can be sent again so."""

    image_url: str
    media: Media
    detail: str = "auto"


class InputSound(msgspec.Struct, frozen=True, tag_field="type", tag="input_audio"):
    """A sound. ``audio_url``: as of a picture."""

    audio_url: str
    media: Media


class InputVideo(msgspec.Struct, frozen=True, tag_field="type", tag="input_video"):
    """A video. ``video_url``: as of a picture."""

    video_url: str
    media: Media


InputPart = InputText | InputImage | InputSound | InputVideo


def input_part(given: str | Media) -> InputPart:
    """A text or a medium as a part of an item."""
    if isinstance(given, str):
        return InputText(given)
    plain = Media(given.kind, given.digest, given.format, given.width, given.height)
    if given.kind == "video":
        return InputVideo(given.url, plain)
    return InputImage(given.url, plain) if given.kind == "image" else InputSound(given.url, plain)


def input_parts(text: str, media: Sequence[PlacedMedia]) -> list[InputPart]:
    """A logged content as the parts of an item; at least one."""
    return [input_part(one) for one in interleave(text, media)] or [InputText("")]


def plain_parts(parts: Iterable[InputPart | OutputText]) -> tuple[str, list[PlacedMedia]]:
    """The parts of an item as a logged content."""
    return join_parts(part.text if isinstance(part, InputText | OutputText) else part.media for part in parts)


class ItemTopLogprob(msgspec.Struct, frozen=True):
    """One alternative."""

    token: str
    bytes: list[int]
    logprob: float


class ItemLogprob(msgspec.Struct, frozen=True):
    """One token of the answer."""

    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[ItemTopLogprob]


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """What the model said. Without log-probabilities the list is empty."""

    text: str
    annotations: list[None] = []
    logprobs: list[ItemLogprob] = []


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """What the model thought."""

    text: str
