"""``PictureChecker``: has pictures decoded by a process with limits, one at a time, before anything else sees them."""

from __future__ import annotations

from typing import NamedTuple

from server.media.decoding_process import DecodingProcess
from server.media.media_limits import CHECK_SECONDS, MAX_PIXELS, MAX_SIDE


class CheckedPicture(NamedTuple):
    """Pixels of a picture, as EXIF turns it; ``reduced``: the bytes of the smaller one that was made of it, if any."""

    width: int
    height: int
    reduced: bytes


class PictureChecker:
    """Checks pictures in a process of its own."""

    def __init__(self, max_pixels: int = MAX_PIXELS, max_side: int = MAX_SIDE, seconds: float = CHECK_SECONDS) -> None:
        self._process = DecodingProcess("picture", seconds, max_pixels, max_side)

    async def check(self, data: bytes, side: int = 0) -> CheckedPicture:
        """What a picture is that is sound. One that does not fit into a square of ``side`` pixels, unless that is 0, is
        made smaller. Raises MediaRefused.
        """
        told, reduced = await self._process.decode(data, side)
        return CheckedPicture(int(str(told["width"])), int(str(told["height"])), reduced)

    async def close(self) -> None:
        await self._process.close()
