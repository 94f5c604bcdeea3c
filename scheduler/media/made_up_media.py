"""Media of noise, with which is measured at load how a model sees and hears."""

from __future__ import annotations

import io
import wave

import numpy as np

from cache.media_frames import join_frames
from scheduler.media.processor import Processor
from scheduler.media.senses import PICTURES, SOUNDS

SIZES = ((64, 48), (48, 96), (120, 120))  # of pictures, in pixels
_SECONDS = (1.1, 1.1, 0.7)  # of sounds; two that are as long need no padding in one forward


def made_up_media(processor: Processor) -> list[bytes]:
    if processor.sense is SOUNDS:
        return [_sound(*one, processor.rate) for one in enumerate(_SECONDS)]
    return [made_up_picture(*size) if processor.sense is PICTURES else _video(*size) for size in SIZES]


def _video(width: int, height: int) -> bytes:
    """Four frames of random pixels, as a client sends them."""
    return join_frames(made_up_picture(width, height, seed) for seed in range(4))


def made_up_picture(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG of random pixels."""
    from PIL import Image

    pixels = np.random.default_rng((width, seed)).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def _sound(seed: int, seconds: float, rate: int) -> bytes:
    """A WAV file of noise."""
    samples = np.random.default_rng(seed).normal(0, 3000, round(seconds * rate))
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.clip(-32768, 32767).astype("<i2").tobytes())
    return buffer.getvalue()
