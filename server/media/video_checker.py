"""``VideoChecker``: has videos decoded by a process with limits, one at a time, before anything else sees them."""

from __future__ import annotations

from cache.media_frames import FRAMES, split_frames
from server.media.decoding_process import DecodingProcess
from server.media.libraries import has_films
from server.media.media_format import video_format
from server.media.media_limits import CHECK_SECONDS, MAX_FRAMES, MAX_PIXELS, MAX_SENT_FRAMES, MAX_SIDE, MediaRefused
from server.media.picture_checker import PictureChecker


class VideoChecker:
    """Checks videos in a process of its own; those that were sent as pictures with ``pictures``."""

    def __init__(self, pictures: PictureChecker) -> None:
        self._pictures = pictures
        self._process = DecodingProcess("video", CHECK_SECONDS, MAX_PIXELS, MAX_SIDE, MAX_FRAMES)

    async def check(self, data: bytes) -> tuple[int, int]:
        """Width and height of a video that is sound. Raises MediaRefused."""
        if data.startswith(FRAMES):
            return await self._check_frames(data)
        if video_format(data) in ("mp4", "webm") and not has_films():
            raise MediaRefused("is in a format that cannot be decoded: the server lacks its extra `video`")
        told = (await self._process.decode(data)).told
        return int(str(told["width"])), int(str(told["height"]))

    async def close(self) -> None:
        await self._process.close()

    async def _check_frames(self, data: bytes) -> tuple[int, int]:
        sizes: list[tuple[int, int]] = []
        try:
            for frame in split_frames(data):
                checked = await self._pictures.check(frame)
                sizes.append((checked.width, checked.height))
                if len(sizes) > MAX_SENT_FRAMES or sum(width * height for width, height in sizes) > MAX_PIXELS:
                    raise MediaRefused(f"has more than {MAX_SENT_FRAMES} frames, or {MAX_PIXELS} pixels in all of them")
        except ValueError:
            raise MediaRefused("is cut short") from None
        if len(sizes) < 2:
            raise MediaRefused("has one frame only, and is a picture")
        return sizes[0]
