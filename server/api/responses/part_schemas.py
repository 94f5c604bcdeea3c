"""Request schemas of the content of items: pieces of text, and in outputs of tools placeholders for what is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from server.media.media import Media
from server.schemas.adaptations import adapt
from server.schemas.media_parts import CheckedMedia, kind_of_part
from server.schemas.strict import Harmless, Strict, missing_field_error

MAX_PARTS = 1000
OTHER_PARTS = frozenset({"input_image", "input_file", "input_audio", "computer_screenshot"})
PLACEHOLDERS = {"input_image": "image", "input_file": "file", "input_audio": "audio", "computer_screenshot": "image"}


def only_text(value: object) -> object:
    """Refuse content types that only other servers support, with an error that says so."""
    if isinstance(value, str) and value in OTHER_PARTS:
        raise ValueError("names a kind of content that is not supported by this server: only text is")
    return value


class Part(Strict):
    """A piece of text; ``annotations`` and ``logprobs`` are what clients send back of an earlier reply, and ``parsed``
    what they have made of it.
    """

    LATER: ClassVar[Harmless] = dict.fromkeys(
        ("image_url", "file_id", "file_data", "file_url", "filename", "detail", "input_audio"), ()
    )
    IDLE: ClassVar[frozenset[str]] = frozenset({"prompt_cache_breakpoint"})
    type: Annotated[
        Literal["input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"],
        BeforeValidator(only_text),
    ]
    text: str | None = None
    refusal: str | None = None
    annotations: list[object] = Field(default_factory=list, max_length=MAX_PARTS)
    logprobs: list[object] = Field(default_factory=list)
    parsed: object = None
    prompt_cache_breakpoint: object = None

    @model_validator(mode="after")
    def has_its_text(self) -> Self:
        """The field that the type names."""
        name = "refusal" if self.type == "refusal" else "text"
        if getattr(self, name) is None:
            raise missing_field_error(name)
        return self

    @property
    def plain(self) -> str:
        return self.text or self.refusal or ""


class ReadablePart(Part):
    """A piece of text. What others have encrypted cannot be read, and is empty."""

    @model_validator(mode="before")
    @classmethod
    def readable(cls, data: object) -> object:
        """Nothing, instead of what cannot be read."""
        if isinstance(data, dict) and data.get("type") == "encrypted_content":
            adapt("reasoning_dropped", "encrypted_content")
            return {"type": "text", "text": ""}
        return data


class OutputPart(Part):
    """A piece of what a tool gave back. Images and files that the model does not see become placeholders: a client
    keeps them in its history, and each later request would be refused too.
    """

    @model_validator(mode="before")
    @classmethod
    def placeholder(cls, data: object) -> object:
        """Text instead of an image or a file."""
        kind = data.get("type") if isinstance(data, dict) else None
        name = PLACEHOLDERS.get(kind) if isinstance(kind, str) else None
        if name is None:
            return data
        adapt("image_replaced" if name == "image" else "file_replaced", "output")
        return {"type": "input_text", "text": f"[{name}]"}


Parts = Annotated[list[Part], Field(max_length=MAX_PARTS), Field(fail_fast=True)]
AnyPart = Annotated[
    Annotated[Part, Tag("<text>")] | Annotated[CheckedMedia, Tag("<media>")], Discriminator(kind_of_part)
]
ShownParts = Annotated[list[AnyPart], Field(max_length=MAX_PARTS), Field(fail_fast=True)]
Text = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[ShownParts, Tag("<parts>")],
    Discriminator(lambda value: "<parts>" if isinstance(value, list) else "<text>"),
]
ReadableParts = Annotated[list[ReadablePart], Field(max_length=MAX_PARTS), Field(fail_fast=True)]
AnyOutputPart = Annotated[
    Annotated[OutputPart, Tag("<text>")] | Annotated[CheckedMedia, Tag("<media>")], Discriminator(kind_of_part)
]
OutputParts = Annotated[list[AnyOutputPart], Field(max_length=MAX_PARTS), Field(fail_fast=True)]
Output = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[OutputParts, Tag("<parts>")],
    Discriminator(lambda value: "<parts>" if isinstance(value, list) else "<text>"),
]


def texts(content: str | Sequence[Part]) -> list[str]:
    """The pieces of a content that is text."""
    return [content] if isinstance(content, str) else [part.plain for part in content]


def pieces(content: str | Sequence[Part | Media]) -> list[str | Media]:
    """The pieces of a content: texts and media."""
    if isinstance(content, str):
        return [content]
    return [part if isinstance(part, Media) else part.plain for part in content]
