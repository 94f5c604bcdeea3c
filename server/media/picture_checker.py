"""``PictureChecker``: has pictures decoded by a process with limits, one at a time, before anything else sees them."""

from __future__ import annotations

from server.media.decoding_process import DecodingProcess
from server.media.limits import CHECK_SECONDS, MAX_PIXELS, MAX_SIDE


class PictureChecker:
    """Checks pictures in a process of its own."""

    def __init__(self, max_pixels: int = MAX_PIXELS, max_side: int = MAX_SIDE, seconds: float = CHECK_SECONDS) -> None:
        self._process = DecodingProcess("picture", seconds, max_pixels, max_side)

    async def check(self, data: bytes) -> tuple[int, int]:
        """Width and height of a picture that is sound, as EXIF turns it. Raises MediaRefused."""
        told = (await self._process.decode(data)).told
        return int(str(told["width"])), int(str(told["height"]))

    async def close(self) -> None:
        """End the process."""
        await self._process.close()
