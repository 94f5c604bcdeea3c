"""``SoundReader``: decodes the sounds of requests that transcribe, and counts the memory that they take."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from server.errors import ApiError, bad_request
from server.media.media_format import sound_format
from server.media.media_limits import IN_HAND, MediaRefused
from server.media.sound_decoder import DecodedSound, SoundDecoder


class SoundReader:
    """The samples of all requests under way take at most ``IN_HAND`` bytes, and those of the last one."""

    def __init__(self, decoder: SoundDecoder | None = None) -> None:
        self._decoder = decoder or SoundDecoder()
        self._in_hand = 0

    @asynccontextmanager
    async def read(self, data: bytes, rate: int, param: str) -> AsyncIterator[DecodedSound]:
        """A context manager: the sound in a file, at ``rate`` samples a second. Raises a 400 that names the field
        ``param``, and a 429 while too many samples are in hand.
        """
        if self._in_hand > IN_HAND:
            message = "Requests under way hold too many sounds."
            raise ApiError(429, message, code="too_many_media", headers={"retry-after": "5"})
        try:
            sound_format(data)
            sound = await self._decoder.decode(data, rate)
        except MediaRefused as error:
            raise bad_request(f"{param} {error.problem}.", param, "invalid_media") from None
        self._in_hand += len(sound.samples)
        try:
            yield sound
        finally:
            self._in_hand -= len(sound.samples)

    async def close(self) -> None:
        await self._decoder.close()
