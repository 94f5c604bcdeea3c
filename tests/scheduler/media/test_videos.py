"""Videos in chats through the engine, against a from-scratch forward of the model's own code with all pixels."""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("PIL")

from seeing_kit import Part, SeeingKit
from video_kit import film
from vision_models import picture

from cache.media_frames import join_frames
from scheduler.media.video_frames import MOST_FRAMES, PER_SECOND, decode_video

CAT = picture(64, 48, 1)
SENT = join_frames([picture(56, 42, seed) for seed in range(5)])


def test_a_chat_with_videos_and_a_picture_says_what_the_model_says() -> None:
    """Frames in the first turn, an animation in the third, in steps of few tokens; each is encoded once."""
    kit = SeeingKit("qwen2_vl", step_tokens=19, watches=True)
    assert kit.facts.media == ("image", "video")
    first: list[Part] = ["<|im_start|>user\nWhat is ", CAT, " in ", SENT, "?<|im_end|>\n<|im_start|>assistant\n"]
    kit.check_chat(first, ["And?"], ["Now ", film(), " too"])
    kit.leave()


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_animations_are_decoded_to_frames(format: str) -> None:
    frames, told, chosen = decode_video(film(5, format=format))
    assert (len(frames), told["fps"], frames[0].size, chosen) == (5, 4.0, (48, 64), False)


def test_frames_are_taken_as_they_were_sent() -> None:
    frames, told, chosen = decode_video(SENT)
    assert (len(frames), told["fps"], chosen) == (5, PER_SECOND, True)


def test_of_a_long_video_frames_equally_far_apart_are_seen() -> None:
    frames, told, _ = decode_video(film(MOST_FRAMES + 44, 4, 4, duration=20))
    assert len(frames) == MOST_FRAMES
    assert told["duration"] == pytest.approx(6.0, abs=0.5)


@pytest.mark.skipif(find_spec("av") is None, reason="PyAV is missing")
def test_films_are_decoded_by_pyav() -> None:
    frames, told, _ = decode_video(mp4(12))
    assert (len(frames), told["fps"], frames[0].size) == (12, 6.0, (48, 64))


def mp4(count: int) -> bytes:
    av = pytest.importorskip("av")
    target = io.BytesIO()
    with av.open(target, "w", format="mp4") as made:
        stream: Any = made.add_stream("mpeg4", rate=6)
        stream.width, stream.height = 48, 64
        for number in range(count):
            frame = av.VideoFrame(48, 64, "rgb24")
            frame.planes[0].update(bytes([number * 9 % 256]) * frame.planes[0].buffer_size)
            made.mux(stream.encode(frame))
        made.mux(stream.encode())
    return target.getvalue()


@pytest.mark.parametrize("data", [SENT[:-20], film()[:60], b"\0\0\0\x18ftypisom", b"nothing"])
def test_what_is_no_video_is_told(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"video|picture"):
        decode_video(data)
