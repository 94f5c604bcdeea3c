"""The parts of contents that are media, as each API writes them, and where they stand in a request's body."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from fastapi.exceptions import RequestValidationError
from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    GetPydanticSchema,
    PlainSerializer,
    Tag,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from server.errors import bad_request
from server.media.media import Media, MediaKind, PlacedMedia, place
from server.media.media_limits import MAX_MEDIA, MAX_SENT_FRAMES
from server.media.media_reader import MediaSource
from server.schemas.adaptations import adapt
from server.schemas.strict import Harmless, Strict, missing_field_error

SHOWN_TO_MODELS = ("user", "tool")  # roles whose messages can have media
Path = tuple[str | int, ...]


class MediaPart(Strict):
    """A part of a content that is a medium. ``KIND``: of which kind."""

    KIND: ClassVar[MediaKind] = "image"
    IDLE: ClassVar[frozenset[str]] = frozenset({"cache_control", "prompt_cache_breakpoint"})
    cache_control: object = None
    prompt_cache_breakpoint: object = None

    def source(self, where: str) -> MediaSource:
        """Where it is; ``where`` is the part's own place."""
        raise AssertionError("each kind of part has its own")


Detail = Literal["auto", "low", "high", "original"]


def picture_source(param: str, url: str, detail: Detail) -> MediaSource:
    """Where a picture is. The model's processor decides how closely it looks at one that is not reduced."""
    if detail not in ("auto", "low"):
        adapt("detail_left_out", "detail")
    return MediaSource("image", param, url=url, low=detail == "low")


class ImageUrl(Strict):
    """The URL of a picture."""

    url: str
    detail: Detail = "auto"


class ImageUrlPart(MediaPart):
    """A picture in a chat."""

    type: Literal["image_url"]
    image_url: ImageUrl

    def source(self, where: str) -> MediaSource:
        return picture_source(f"{where}.image_url.url", self.image_url.url, self.image_url.detail)


class InputAudio(Strict):
    """A sound as base64."""

    data: str
    format: Literal["wav", "mp3"]


class InputAudioPart(MediaPart):
    """A sound in a chat or a response's input."""

    KIND = "audio"
    type: Literal["input_audio"]
    input_audio: InputAudio

    def source(self, where: str) -> MediaSource:
        return MediaSource("audio", f"{where}.input_audio.data", base64=self.input_audio.data)


class AudioUrl(Strict):
    """The URL of a sound."""

    url: str


class AudioUrlPart(MediaPart):
    """A sound in a chat, by its URL, as vLLM's clients send it."""

    KIND = "audio"
    type: Literal["audio_url"]
    audio_url: AudioUrl

    def source(self, where: str) -> MediaSource:
        return MediaSource("audio", f"{where}.audio_url.url", url=self.audio_url.url)


class VideoUrl(Strict):
    """The URL of a video."""

    url: str


class VideoUrlPart(MediaPart):
    """A video in a chat, by its URL, as vLLM's clients send it."""

    KIND = "video"
    type: Literal["video_url"]
    video_url: VideoUrl

    def source(self, where: str) -> MediaSource:
        return MediaSource("video", f"{where}.video_url.url", url=self.video_url.url)


class VideoPart(MediaPart):
    """A video in a chat, by its URL or as a list of its frames, as clients of Qwen's models send it."""

    KIND = "video"
    type: Literal["video"]
    video: Annotated[
        Annotated[str, Tag("<url>")]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_SENT_FRAMES), Tag("<frames>")],
        Discriminator(lambda value: "<frames>" if isinstance(value, list) else "<url>"),
    ]

    def source(self, where: str) -> MediaSource:
        if isinstance(self.video, str):
            return MediaSource("video", f"{where}.video", url=self.video)
        return MediaSource("video", f"{where}.video", frames=tuple(self.video))


class FileData(Strict):
    """A file as base64, in a data: URL or alone."""

    LATER: ClassVar[Harmless] = {"file_id": ()}
    IDLE: ClassVar[frozenset[str]] = frozenset({"filename"})
    file_data: str
    filename: str | None = None


class FilePart(MediaPart):
    """A file in a chat: a picture."""

    type: Literal["file"]
    file: FileData

    def source(self, where: str) -> MediaSource:
        return file_source(f"{where}.file.file_data", self.file.file_data)


class InputImagePart(MediaPart):
    """A picture in a response's input, or in what a tool gave back."""

    LATER: ClassVar[Harmless] = {"file_id": ()}
    type: Literal["input_image", "computer_screenshot"]
    image_url: str
    detail: Detail = "auto"

    def source(self, where: str) -> MediaSource:
        return picture_source(f"{where}.image_url", self.image_url, self.detail)


class InputFilePart(MediaPart):
    """A file in a response's input: a picture."""

    LATER: ClassVar[Harmless] = {"file_id": ()}
    IDLE: ClassVar[frozenset[str]] = MediaPart.IDLE | {"filename", "detail"}
    type: Literal["input_file"]
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None
    detail: str | None = None

    @model_validator(mode="after")
    def is_somewhere(self) -> Self:
        """In one of both fields."""
        if (self.file_data is None) == (self.file_url is None):
            raise missing_field_error("file_data")
        return self

    def source(self, where: str) -> MediaSource:
        if self.file_url is not None:
            return MediaSource("image", f"{where}.file_url", url=self.file_url)
        return file_source(f"{where}.file_data", self.file_data or "")


class Base64Source(Strict):
    """A picture as base64. What it is called is not looked at."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(Strict):
    """A picture's URL."""

    type: Literal["url"]
    url: str


class ImageBlock(MediaPart):
    """A picture in a message of Anthropic's API."""

    IDLE: ClassVar[frozenset[str]] = MediaPart.IDLE | {"transformations"}
    type: Literal["image"]
    transformations: object = None
    given: Annotated[
        Annotated[Base64Source, Tag("<base64>")] | Annotated[UrlSource, Tag("<url>")],
        Discriminator(lambda value: "<url>" if isinstance(value, dict) and value.get("type") == "url" else "<base64>"),
        Field(alias="source"),
    ]

    def source(self, where: str) -> MediaSource:
        if isinstance(self.given, UrlSource):
            return MediaSource("image", f"{where}.source.url", url=self.given.url)
        return MediaSource("image", f"{where}.source.data", base64=self.given.data)


class BareImage(MediaPart):
    """A picture that is base64 alone."""

    data: str

    @model_validator(mode="before")
    @classmethod
    def bare(cls, data: object) -> object:
        """The text as a part."""
        return {"data": data}

    def source(self, where: str) -> MediaSource:
        return MediaSource("image", where, base64=self.data)


def file_source(param: str, data: str) -> MediaSource:
    return (
        MediaSource("image", param, url=data) if data.startswith("data:") else MediaSource("image", param, base64=data)
    )


CHAT_PARTS: dict[str, type[MediaPart]] = {
    "image_url": ImageUrlPart,
    "input_audio": InputAudioPart,
    "audio_url": AudioUrlPart,
    "video_url": VideoUrlPart,
    "video": VideoPart,
    "file": FilePart,
    "image": ImageBlock,
}
ITEM_PARTS: dict[str, type[MediaPart]] = {
    "input_image": InputImagePart,
    "computer_screenshot": InputImagePart,
    "input_file": InputFilePart,
    "input_audio": InputAudioPart,
}


@dataclass(frozen=True)
class MediaSlot:
    """A part of a body that is a medium: number ``index`` of the list ``within``."""

    within: list[Any]
    index: int
    path: Path
    schema: type[MediaPart]

    def source(self) -> MediaSource:
        """Where the medium is. Raises a 400 for a part that is not as its API writes it."""
        try:
            part = self.schema.model_validate(self.within[self.index])
        except ValidationError as error:
            first = error.errors()[0]
            raise RequestValidationError([{**first, "loc": ("body", *self.path, *first["loc"])}]) from None
        return part.source(dot_path(self.path))


def dot_path(path: Path) -> str:
    """``messages[0].content[1]``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def ollama_slots(body: dict[str, Any]) -> Iterator[MediaSlot]:
    """Pictures in Ollama's chats and prompts, which are base64 alone."""
    if "prompt" in body:
        yield from bare_slots(body.get("images"), ("images",))
    for number, message in enumerate(lists(body.get("messages"))):
        if isinstance(message, dict) and message.get("role") in SHOWN_TO_MODELS:
            yield from bare_slots(message.get("images"), ("messages", number, "images"))


def bare_slots(images: object, path: Path) -> Iterator[MediaSlot]:
    """The strings of a list."""
    for index, image in enumerate(lists(images)):
        if isinstance(image, str):
            yield MediaSlot(lists(images), index, (*path, index), BareImage)


def media_slots(body: dict[str, Any], kinds: frozenset[str]) -> list[MediaSlot]:
    """The parts of a request that are media of these kinds, where a model would see them. Raises a 400 for too many."""
    slots: list[MediaSlot] = []
    for slot in (*chat_slots(body), *item_slots(body), *ollama_slots(body)):
        if slot.schema.KIND in kinds:
            if len(slots) == MAX_MEDIA:
                raise bad_request(f"A request can have {MAX_MEDIA} pictures and sounds.", dot_path(slot.path))
            slots.append(slot)
    return slots


def chat_slots(body: dict[str, Any]) -> Iterator[MediaSlot]:
    """Media in the messages of a chat, and in the new content of a message that is edited."""
    yield from slots_in(body.get("content"), ("content",), CHAT_PARTS)
    for number, message in enumerate(lists(body.get("messages"))):
        if isinstance(message, dict) and message.get("role") in SHOWN_TO_MODELS:
            path = ("messages", number, "content")
            yield from slots_in(message.get("content"), path, CHAT_PARTS)
            for place, block in enumerate(lists(message.get("content"))):
                if isinstance(block, dict) and block.get("type") == "tool_result":
                    yield from slots_in(block.get("content"), (*path, place, "content"), CHAT_PARTS)


def item_slots(body: dict[str, Any]) -> Iterator[MediaSlot]:
    """Media in items: of messages, and of what tools gave back."""
    for field in ("input", "items"):
        for number, item in enumerate(lists(body.get(field))):
            if isinstance(item, dict) and item.get("role", "user") == "user":
                for name in ("content", "output"):
                    yield from slots_in(item.get(name), (field, number, name), ITEM_PARTS)


def slots_in(content: object, path: Path, schemas: dict[str, type[MediaPart]]) -> Iterator[MediaSlot]:
    """The media of one content."""
    parts = lists(content)
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in schemas:
            yield MediaSlot(parts, index, (*path, index), schemas[kind])


def lists(value: object) -> list[Any]:
    """The value, if it is a list; else an empty one."""
    return value if isinstance(value, list) else []


def as_json(media: Media) -> dict[str, object]:
    """A medium in a request, where that is written: what it is, not where it was."""
    return {"type": media.kind, "digest": media.digest}


# Media that were read and checked stand in a body in place of their parts: no JSON can say so.
CheckedMedia = Annotated[
    Media,
    GetPydanticSchema(lambda source, handler: core_schema.is_instance_schema(Media)),
    PlainSerializer(as_json),
    WithJsonSchema({"type": "object", "title": "Media"}),
]


def only_checked(value: object) -> object:
    """Refuse a list with anything but checked media, as a field that is not supported."""
    if isinstance(value, list) and not all(isinstance(one, Media) for one in value):
        raise PydanticCustomError("unsupported", "is not supported by this server yet")
    return value


CheckedImages = Annotated[list[CheckedMedia], BeforeValidator(only_checked)]


def kind_of_part(value: object) -> str:
    """Whether a part is a medium, for unions of parts."""
    return "<media>" if isinstance(value, Media) else "<text>"


def join_parts(parts: Iterable[str | Media]) -> tuple[str, list[PlacedMedia]]:
    """The text of a content's parts, and the media placed in it. Texts behind each other are joined by newlines."""
    text, media, after_text = "", list[PlacedMedia](), False
    for part in parts:
        if isinstance(part, Media):
            media.append(place(part, len(text)))
        else:
            text += f"\n{part}" if after_text else part
        after_text = isinstance(part, str)
    return text, media
