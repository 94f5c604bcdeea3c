"""``Sense``: pictures or sounds, as transformers' processors and models name what belongs to them."""

from __future__ import annotations

import io
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from cache.error_line import first_line

MOST_PIXELS = 1 << 26  # of a picture that is decoded here; the server has lower limits
MOST_SECONDS = 3600  # of a sound that is decoded here


@dataclass(frozen=True)
class Sense:
    """``kind``: as media are called; ``noun``: for people. ``argument``: of a processor, that takes some; ``mark``: its
    attribute with what a prompt has for one; ``parts``: its attributes with what prepares them, of which it has one.
    ``inputs``: arguments of a model's forward, of which it has one. ``modality``: their number among kinds of tokens.
    ``libraries`` that decode them. ``encode``: the method that runs a model's encoder, and ``output`` the name under
    which its forward takes what that has made; empty: there is none.
    """

    kind: str
    noun: str
    argument: str
    mark: str
    parts: tuple[str, ...]
    inputs: tuple[str, ...]
    modality: int
    libraries: tuple[str, ...]
    encode: str = ""
    output: str = ""

    @property
    def is_there(self) -> bool:
        """Whether its libraries are installed."""
        return all(find_spec(name) is not None for name in self.libraries)


PICTURES = Sense(
    "image",
    "picture",
    "images",
    "image_token",
    ("image_processor",),
    ("pixel_values", "image_pixel_values"),
    1,
    ("PIL",),
    "get_image_features",
    "image",
)
VIDEOS = Sense(
    "video",
    "video",
    "videos",
    "video_token",
    ("video_processor",),
    ("pixel_values_videos",),
    2,
    ("PIL",),
    "get_video_features",
    "video",
)
SOUNDS = Sense(
    "audio",
    "sound",
    "audio",
    "audio_token",
    ("feature_extractor", "audio_processor"),
    ("input_features", "input_values", "audio_input_features", "audio_input_ids"),
    3,
    ("soundfile", "soxr"),
)


def decode_picture(data: bytes) -> Any:
    """The picture of encoded bytes, upright, in RGB. Raises ValueError."""
    from PIL import Image, ImageOps

    try:
        opened = Image.open(io.BytesIO(data))
        if opened.width * opened.height > MOST_PIXELS:
            raise ValueError("the picture has too many pixels")
        return ImageOps.exif_transpose(opened).convert("RGB")
    except (OSError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(f"the picture cannot be decoded: {first_line(error, 80)}") from None


def decode_sound(data: bytes, rate: int) -> Any:
    """The samples of encoded bytes, float32 ``[samples]``, mono, ``rate`` of them a second. Raises ValueError."""
    import soundfile
    import soxr

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as sound:
            if sound.frames > MOST_SECONDS * sound.samplerate:
                raise ValueError("the sound is too long")
            samples = sound.read(dtype="float32", always_2d=True).mean(1)
            own = sound.samplerate
    except (OSError, RuntimeError, EOFError) as error:  # libsndfile's are RuntimeErrors
        raise ValueError(f"the sound cannot be decoded: {first_line(error, 80)}") from None
    return samples if own == rate else soxr.resample(samples, own, rate)
