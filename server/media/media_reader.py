"""``MediaReader``: the media of a request, from where they are to bytes that were checked."""

from __future__ import annotations

import asyncio
import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache.media_frames import join_frames
from server.errors import ApiError, bad_request
from server.media.inline import from_base64, from_data_url
from server.media.libraries import has_pillow, has_sounds
from server.media.media import STORED, Media, MediaKind
from server.media.media_format import format_of
from server.media.media_limits import (
    IN_HAND,
    LOW_SIDE,
    MAX_BYTES,
    MAX_REDUCED,
    MAX_SECONDS,
    MAX_TOTAL,
    MediaRefused,
    too_large,
)
from server.media.picture_checker import PictureChecker
from server.media.sound_decoder import SoundDecoder
from server.media.targets import target_of
from server.media.video_checker import VideoChecker

if TYPE_CHECKING:
    from server.media.fetching import Fetcher

KNOWN = 4096  # media that were checked before
DIGEST = 64  # characters

Stored = Callable[[str, str], Awaitable[bytes | None]]


@dataclass(frozen=True)
class MediaSource:
    """Where a medium is: a URL, or base64. ``param``: the field of the request that says so. ``low``: a small version
    of the picture will do. ``frames``: the URLs of the pictures of a video.
    """

    kind: MediaKind
    param: str
    url: str | None = None
    base64: str | None = None
    low: bool = False
    frames: tuple[str, ...] = ()


class HeldMedia(dict[str, bytes]):
    """The bytes of a request's media, by digest; ``sizes`` are theirs. ``reduced``: how many pictures were made
    smaller.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reduced = 0
        self.sizes: list[int] = []


class MediaReader:
    """Reads media. ``stored`` finds the bytes of a tenant's media by their
    digest; without a ``fetcher`` nothing is downloaded. All bytes of requests under way are counted, until their
    ``HeldMedia`` is gone.
    """

    def __init__(
        self,
        stored: Stored,
        fetcher: Fetcher | None = None,
        checker: PictureChecker | None = None,
        decoder: SoundDecoder | None = None,
    ) -> None:
        self._stored = stored
        self._fetcher = fetcher
        self._checker = checker or PictureChecker()
        self._videos = VideoChecker(self._checker)
        self._decoder = decoder or SoundDecoder(MAX_SECONDS)
        self._known: OrderedDict[tuple[str, str, str], Media] = OrderedDict()
        self._reduced: OrderedDict[tuple[str, str], bytes] = OrderedDict()  # by tenant and digest of the whole picture
        self._in_hand = 0
        self._pillow = has_pillow()
        there = {"image": self._pillow, "audio": has_sounds(), "video": self._pillow}
        self._lacking = {kind for kind, is_there in there.items() if not is_there}

    def readable(self, kinds: Collection[str]) -> frozenset[str]:
        """Those of ``kinds`` that can be read here. Both need libraries."""
        return frozenset(kinds) - self._lacking

    async def read(self, tenant: str, sources: Sequence[MediaSource]) -> tuple[list[Media], HeldMedia]:
        """The media, checked, and their bytes. Raises a 400 that names the field at fault, and a 429 while too many
        bytes are in hand.
        """
        held, made = HeldMedia(), []
        weakref.finalize(held, self._release, held.sizes)
        for source in sources:
            try:
                data = await self._bytes_of(tenant, source)
                if source.low and self._pillow:
                    whole, data = data, await self._reduce(tenant, data)
                    held.reduced += data is not whole
                media = await self._check(tenant, source.kind, data)
            except MediaRefused as error:
                raise bad_request(f"{source.param} {error.problem}.", source.param, "invalid_media") from None
            if media.digest not in held:
                self._hold(held, len(data), source.param)
                held[media.digest] = data
            made.append(media)
        return made, held

    async def check(self, kind: MediaKind, data: bytes) -> Media:
        """What the bytes are, after all of them were read. Raises MediaRefused."""
        digest = await asyncio.to_thread(digest_of, data)
        format = format_of(data, kind)
        if kind == "audio":
            await self._decoder.decode(data)
            return Media(kind, digest, format)
        if not self._pillow:
            raise MediaRefused("cannot be read: the server lacks its extra `media`")
        if kind == "video":
            return Media(kind, digest, format, *await self._videos.check(data))
        checked = await self._checker.check(data)
        return Media(kind, digest, format, checked.width, checked.height)

    async def close(self) -> None:
        """End what was started for it."""
        if self._fetcher is not None:
            await self._fetcher.close()
        await self._checker.close()
        await self._videos.close()
        await self._decoder.close()

    async def _bytes_of(self, tenant: str, source: MediaSource) -> bytes:
        if source.frames:
            frames = [await self._bytes_at(tenant, url) for url in source.frames]
            if sum(map(len, frames)) > MAX_BYTES:
                raise too_large()
            return join_frames(frames)
        if source.url is None:
            return await asyncio.to_thread(from_base64, source.base64 or "")
        return await self._bytes_at(tenant, source.url)

    async def _bytes_at(self, tenant: str, url: str) -> bytes:
        if url[:5].lower() == "data:":
            return await asyncio.to_thread(from_data_url, url)
        if url.startswith(STORED) and len(url) == len(STORED) + DIGEST:
            data = await self._stored(tenant, url.removeprefix(STORED))
            if data is None:
                raise MediaRefused("names no picture or sound of a session")
            return data
        if self._fetcher is None:
            target_of(url, ())
            raise AssertionError("no host is named")
        return await self._fetcher.fetch(url)

    async def _check(self, tenant: str, kind: MediaKind, data: bytes) -> Media:
        """What the bytes are. What a tenant has sent before is known."""
        digest = await asyncio.to_thread(digest_of, data)
        key = tenant, kind, digest
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        media = self._known[key] = await self.check(kind, data)
        while len(self._known) > KNOWN:
            self._known.popitem(last=False)
        return media

    async def _reduce(self, tenant: str, data: bytes) -> bytes:
        """A picture that fits into a square of ``LOW_SIDE`` pixels: this one, or one that was made of it, which is
        another one to all that compares pictures. Those that were made last are remembered.
        """
        format_of(data, "image")
        key = tenant, await asyncio.to_thread(digest_of, data)
        made = self._reduced.pop(key, None)
        if made is None:
            made = (await self._checker.check(data, LOW_SIDE)).reduced or data
        if made is data:
            return data
        self._reduced[key] = made
        while sum(map(len, self._reduced.values())) > MAX_REDUCED:
            self._reduced.popitem(last=False)
        return made

    def _hold(self, held: HeldMedia, size: int, param: str) -> None:
        if sum(held.sizes) + size > MAX_TOTAL:
            raise bad_request(f"{param} is beyond the {MAX_TOTAL} bytes of a request's media.", param, "invalid_media")
        if self._in_hand + size > IN_HAND:
            message = "Requests under way hold too many pictures and sounds."
            raise ApiError(429, message, code="too_many_media", headers={"retry-after": "5"})
        self._in_hand += size
        held.sizes.append(size)

    def _release(self, sizes: list[int]) -> None:
        self._in_hand -= sum(sizes)


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
