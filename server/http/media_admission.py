"""Reads the media of a request before its body is validated: in place of the part that names one, the body then has the
``Media``. A model that takes no media leaves all as it is, and the schemas refuse it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol, get_args

from starlette.requests import HTTPConnection, Request

from server.log.media_rows import NO_MEDIA
from server.media.media import MediaKind
from server.media.media_reader import MediaReader
from server.schemas.adaptations import adapt
from server.schemas.media_parts import media_slots


class MediaModels(Protocol):
    """What knows the kinds of media that a request's model takes: the app's ``state.models``."""

    @property
    def may_take_media(self) -> bool: ...

    async def media_kinds(self, connection: HTTPConnection, name: str) -> Collection[str]: ...


async def admit_media(request: Request, body: dict[str, Any]) -> None:
    """Read and check the media of ``body``, which is changed; their bytes are in ``request.state.media`` then. Raises a
    400 that names the field at fault, and a 429 while too many bytes are in hand.
    """
    reader: MediaReader = request.app.state.media_reader
    models: MediaModels = request.app.state.models
    if not models.may_take_media or not media_slots(body, frozenset(get_args(MediaKind))):
        return
    name = body.get("model")
    kinds = reader.readable(await models.media_kinds(request, name if isinstance(name, str) else ""))
    slots = media_slots(body, kinds) if kinds else []
    if not slots:
        return
    media, held = await reader.read(request.state.tenant, [slot.source() for slot in slots])
    for slot, one in zip(slots, media, strict=True):
        slot.within[slot.index] = one
    if held.reduced:
        adapt("picture_reduced", "detail", held.reduced)
    request.state.media = held


def media_of(request: Request) -> Mapping[str, bytes]:
    """The bytes of the media of a request, by digest."""
    held: Mapping[str, bytes] = getattr(request.state, "media", NO_MEDIA)
    return held


def add_media(request: Request, more: Mapping[str, bytes]) -> None:
    """Let a request have the media of what it continues too."""
    if more:
        request.state.media = JoinedMedia(media_of(request), more)


class JoinedMedia(Mapping[str, bytes]):
    """Media of two mappings, which stay as they are: what counts their bytes counts them as long as either is used."""

    def __init__(self, one: Mapping[str, bytes], other: Mapping[str, bytes]) -> None:
        self._one, self._other = one, other

    def __getitem__(self, digest: str) -> bytes:
        return self._one[digest] if digest in self._one else self._other[digest]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._one, *self._other]))

    def __len__(self) -> int:
        return len(dict.fromkeys([*self._one, *self._other]))
