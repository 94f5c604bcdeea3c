"""``Media``: a picture, a sound or a video as messages name it. Its bytes are in the log, one copy per tenant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import msgspec

STORED = "/v1/media/"  # in front of a digest: the path of what a session has
MediaKind = Literal["image", "audio", "video"]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class Media(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``digest``: SHA-256 of the original bytes, hexadecimal. ``format``: by the content, not by a name ("png", "jpeg",
    "webp", "gif", "wav", "frames"). ``width`` and ``height``: pixels, after the orientation that EXIF tells; 0 for
    audio.
    """

    kind: MediaKind
    digest: Digest
    format: Annotated[str, msgspec.Meta(pattern="^[a-z0-9]{1,16}$")]
    width: Count = 0
    height: Count = 0

    @property
    def url(self) -> str:
        """Where this server gives the bytes out, as a path."""
        return f"{STORED}{self.digest}"

    @property
    def media_type(self) -> str:
        """The type of the bytes, as HTTP names it."""
        return f"{self.kind}/{self.format}"


class PlacedMedia(Media, frozen=True, forbid_unknown_fields=True):
    """Media in a message; ``at``: how many characters of the message's text stand before it."""

    at: Count = 0


def place(media: Media, at: int) -> PlacedMedia:
    """``media`` behind ``at`` characters of a text."""
    return PlacedMedia(media.kind, media.digest, media.format, media.width, media.height, at)


def move(media: Iterable[PlacedMedia], by: int) -> list[PlacedMedia]:
    """The media of a text that comes to stand behind ``by`` more characters."""
    return [place(one, one.at + by) for one in media]


def interleave(text: str, media: Sequence[PlacedMedia]) -> list[str | PlacedMedia]:
    """Text and media in their order, without empty texts. Media that were placed behind the end of the text (it was
    made shorter since) stand at its end.
    """
    made: list[str | PlacedMedia] = []
    start = 0
    for one in media:
        end = max(start, min(one.at, len(text)))
        made += [text[start:end], one] if end > start else [one]
        start = end
    return [*made, text[start:]] if start < len(text) else made


def without_media(text: str, media: Sequence[PlacedMedia]) -> str:
    """The text with the kind of each medium in brackets, in its place."""
    return "".join(one if isinstance(one, str) else f"[{one.kind}]" for one in interleave(text, media))
