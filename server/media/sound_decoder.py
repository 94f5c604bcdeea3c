"""``SoundDecoder``: has sounds decoded by a process with limits, one at a time, before anything else hears them."""

from __future__ import annotations

from typing import NamedTuple

from server.media.decoding_process import DecodingProcess
from server.media.libraries import has_sounds
from server.media.media_limits import LONGEST_SOUND, MediaRefused

DECODE_SECONDS = 60.0  # for one


class DecodedSound(NamedTuple):
    """A sound that was decoded whole. ``format``: "wav", "flac", "ogg" or "mp3". ``samples``: int16, mono, at the rate
    that was asked for.
    """

    seconds: float
    format: str
    samples: bytes


class SoundDecoder:
    """Decodes sounds of up to ``longest`` seconds in a process of its own."""

    def __init__(self, longest: int = LONGEST_SOUND, seconds: float = DECODE_SECONDS) -> None:
        self._process = DecodingProcess("sound", seconds, longest)
        self._can = has_sounds()

    async def decode(self, data: bytes, rate: int = 0) -> DecodedSound:
        """The sound; without a ``rate`` no samples. Raises MediaRefused."""
        if not self._can:
            raise MediaRefused("cannot be read: the server lacks its extra `media`")
        told, samples = await self._process.decode(data, rate)
        return DecodedSound(float(str(told["seconds"])), str(told["format"]), samples)

    async def close(self) -> None:
        await self._process.close()
