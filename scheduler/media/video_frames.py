"""``VideoFrames``: the frames of a video, as a model's processor takes them."""

from __future__ import annotations

import io
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from cache.error_line import first_line
from cache.media_frames import FRAMES, split_frames
from scheduler.media.senses import decode_picture

MOST_FRAMES = 256  # of one video; a longer one is seen in as many, equally far apart
MOST_PIXELS = 1 << 26  # of all frames that are decoded here; the server has lower limits
PER_SECOND = 2.0  # frames of a video that was sent as pictures, as clients of Qwen's models have it


class VideoFrames(NamedTuple):
    """``frames``: pictures, RGB, of one size. ``told``: what processors want to know of them. ``chosen``: the client
    has sent these very ones, and none may be left out.
    """

    frames: list[Any]
    told: dict[str, Any]
    chosen: bool


def decode_video(data: bytes) -> VideoFrames:
    """The frames of encoded bytes. Raises ValueError."""
    try:
        if data.startswith(FRAMES):
            return _video(_pictures(data), PER_SECOND, True)
        return _animation(data) if _is_animation(data) else _film(data)
    except (OSError, SyntaxError, EOFError) as error:  # PyAV's errors are OSErrors or ValueErrors
        raise ValueError(f"the video cannot be decoded: {first_line(error, 80)}") from None


def _pictures(data: bytes) -> list[Any]:
    made = [decode_picture(part) for part in split_frames(data)]
    return [one if one.size == made[0].size else one.resize(made[0].size) for one in made]


def _is_animation(data: bytes) -> bool:
    return data[:4] in (b"GIF8", b"\x89PNG") or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")


def _animation(data: bytes) -> VideoFrames:
    from PIL import Image, ImageSequence

    opened = Image.open(io.BytesIO(data))
    count = getattr(opened, "n_frames", 1)
    frames, lasted = list[Any](), 0.0
    for number, frame in enumerate(ImageSequence.Iterator(opened)):
        frame.load()  # only then some formats tell how long it lasts
        lasted += frame.info.get("duration", 0)
        if number * MOST_FRAMES // max(count, MOST_FRAMES) == len(frames):
            frames.append(_bounded(frame.convert("RGB"), frames))
    return _video(frames, len(frames) * 1000 / lasted if lasted > 0 else 10.0, False)


def _film(data: bytes) -> VideoFrames:
    if find_spec("av") is None:
        raise ValueError("the video is in a format that cannot be decoded here")
    with import_module("av").open(io.BytesIO(data)) as opened:
        stream = opened.streams.video[0]
        rate = float(stream.average_rate or 25)
        count = stream.frames or round(float(stream.duration or 0) * float(stream.time_base or 0) * rate)
        apart = max(1, -(-count // MOST_FRAMES))
        frames: list[Any] = []
        for number, frame in enumerate(opened.decode(stream)):
            if number % apart == 0 and len(frames) < MOST_FRAMES:
                frames.append(_bounded(frame.to_image(), frames))
    return _video(frames, rate / apart, False)


def _bounded(frame: Any, before: list[Any]) -> Any:
    if (len(before) + 1) * frame.width * frame.height > MOST_PIXELS:
        raise ValueError("the video has too many pixels")
    return frame


def _video(frames: list[Any], rate: float, chosen: bool) -> VideoFrames:
    if not frames:
        raise ValueError("the video has no frames")
    width, height = frames[0].size
    told = {
        "total_num_frames": len(frames),
        "fps": rate,
        "duration": len(frames) / rate,
        "width": width,
        "height": height,
        "video_backend": "pillow",
    }
    return VideoFrames(frames, told, chosen)
