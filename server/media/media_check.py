"""The program of the processes that decode media, so that a decoder's fault or hunger stays there.

It needs Pillow, PyAV for films, or soundfile and soxr, and imports nothing of ours: it is run as a file. It reads two
numbers (8 bytes each, big-endian), a length and a sample rate or the side of a square in pixels, and so many bytes, and
answers one line of JSON, again and again; where that has ``bytes``, so many follow it. Its memory, its CPU seconds per
medium, its files and its processes are limited.
"""

from __future__ import annotations

import io
import json
import resource
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

MEMORY = 1 << 30  # bytes of address space beyond what it begins with
NO_LIBRARY = 3  # exit status
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF")
TURNED = frozenset({5, 6, 7, 8})  # values of EXIF's orientation that exchange width and height
ORIENTATION = 0x0112
SOUND_FORMATS = {"WAV": "wav", "WAVEX": "wav", "FLAC": "flac", "OGG": "ogg", "MP3": "mp3"}  # as libsndfile calls them
SEEN_FRAMES = 256  # of a video; of a longer one that many are seen
MAX_CHANNELS = 8
RATES = (4_000, 384_000)  # samples per second
COMPLETE = 0.95  # part of the samples that a file announces, at least

OGG_END = 4  # in the flags of a page: the last one of its stream

Answer = tuple[dict[str, object], bytes]
DAMAGED = "is damaged, cut short, or no valid"


def main(kind: str, seconds: int, *limits: int) -> int:
    """Serve until the input ends."""
    prepare: dict[str, Callable[..., Callable[[bytes, int], Answer] | None]]
    prepare = {"picture": prepare_pictures, "sound": prepare_sounds, "video": prepare_videos}
    look = prepare[kind](*limits)
    if look is None:
        return NO_LIBRARY
    confine()
    source, answers = sys.stdin.buffer, sys.stdout.buffer
    while head := source.read(16):
        length, rate = struct.unpack(">QQ", head)
        data = source.read(length)
        limit_seconds(seconds)
        made = b""
        try:
            answer, made = look(data, rate)
        except MemoryError:
            answer = {"refused": "needs too much memory to be decoded"}
        except Exception:  # whatever a decoder raises, the medium did it
            answer = {"refused": f"{DAMAGED} {kind}"}
        del data
        answers.write(json.dumps({**answer, "bytes": len(made)}).encode() + b"\n")
        answers.write(made)
        answers.flush()
    return 0


def prepare_pictures(max_pixels: int, max_side: int) -> Callable[[bytes, int], Answer] | None:
    """What looks at pictures; None where Pillow is missing."""
    try:
        from PIL import Image, ImageFile
    except ImportError:
        return None
    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = None  # they are counted here
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    Image.init()
    return lambda data, side: look_at(data, side, max_pixels, max_side)


def look_at(data: bytes, side: int, max_pixels: int, max_side: int) -> Answer:
    """What the picture is, after all of it was decoded; or why it is refused. One that does not fit into a square of
    ``side`` pixels is made smaller, a PNG, which is given back; 0: it is left as it is.
    """
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
        width, height = picture.size  # as its header says: nothing was decoded yet
        if not (1 <= width <= max_side and 1 <= height <= max_side) or width * height > max_pixels:
            return {"refused": f"has more than {max_pixels} pixels, or a side of more than {max_side}"}, b""
        if picture.format != "MPO" and getattr(picture, "is_animated", False):
            return {"refused": "is animated, which is not supported"}, b""
        picture.load()
        if side and max(width, height) > side:
            small = ImageOps.exif_transpose(picture).convert("RGB")
            small.thumbnail((side, side), Image.Resampling.BICUBIC)
            target = io.BytesIO()
            small.save(target, "PNG")
            return {"width": small.width, "height": small.height}, target.getvalue()
        if picture.getexif().get(ORIENTATION) in TURNED:
            width, height = height, width
        return {"width": width, "height": height}, b""


def prepare_videos(max_pixels: int, max_side: int, max_frames: int) -> Callable[[bytes, int], Answer] | None:
    """What looks at videos; None where Pillow is missing."""
    if prepare_pictures(max_pixels, max_side) is None:
        return None
    with suppress(ImportError):
        import_module("av")  # what it loads, it loads now
    return lambda data, _: (watch(data, max_pixels, max_side, max_frames), b"")


def watch(data: bytes, max_pixels: int, max_side: int, max_frames: int) -> dict[str, object]:
    """What the video is, after all of it was decoded; or why it is refused."""
    films = data[4:8] == b"ftyp" or data[:4] == b"\x1a\x45\xdf\xa3"
    width, height, frames = 0, 0, 0
    for width, height in films_of(data) if films else animation_of(data):
        frames += 1
        if not (1 <= width <= max_side and 1 <= height <= max_side) or width * height > max_pixels:
            return {"refused": f"has more than {max_pixels} pixels, or a side of more than {max_side}"}
        if frames > max_frames or width * height * min(frames, SEEN_FRAMES) > max_pixels:
            return {"refused": f"has more than {max_frames} frames, or {max_pixels} pixels in those that are seen"}
    if frames < 2:
        return {"refused": "has one frame only, and is a picture"}
    return {"width": width, "height": height, "frames": frames}


def animation_of(data: bytes) -> Iterator[tuple[int, int]]:
    """The size of each frame of an animated picture: first as its header says, then after it was decoded."""
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=("GIF", "PNG", "WEBP")) as picture:
        if not getattr(picture, "is_animated", False):
            yield picture.size
            return
        number = 0
        while True:
            yield picture.size
            try:
                picture.seek(number)
                picture.load()
            except EOFError:
                return
            number += 1
            if number == picture.n_frames:
                return


def films_of(data: bytes) -> Iterator[tuple[int, int]]:
    """The size of each frame of a film."""
    with import_module("av").open(io.BytesIO(data)) as film:
        stream = film.streams.video[0]
        stream.codec_context.thread_count = 1  # this process may start no threads
        if max(stream.width, stream.height) > 1 << 14:  # too large to be decoded at all
            yield stream.width, stream.height
        for frame in film.decode(stream):
            yield frame.width, frame.height


def prepare_sounds(max_seconds: int) -> Callable[[bytes, int], Answer] | None:
    """What listens to sounds; None where a library is missing."""
    try:
        import numpy
        import soundfile
        import soxr
    except ImportError:
        return None
    soxr.resample(numpy.zeros(64, numpy.float32), 8000, 16000)  # what it loads, it loads now
    del soundfile
    return lambda data, rate: listen_to(data, rate, max_seconds)


def listen_to(data: bytes, rate: int, max_seconds: int) -> Answer:
    """The seconds and the format of a sound, after all of it was decoded, and its samples: int16, mono, at ``rate``; 0:
    none. Or why it is refused.
    """
    import numpy
    import soundfile
    import soxr

    if lacks_samples(data):
        return {"refused": "is a WAV file that is cut short"}, b""
    if lacks_pages(data):
        return {"refused": "is an Ogg file that is cut short, or that has no end"}, b""
    with soundfile.SoundFile(io.BytesIO(data)) as sound:
        format = SOUND_FORMATS.get(sound.format)
        if format is None:
            return {"refused": "is not WAV, FLAC, Ogg or MP3 audio"}, b""
        if not 1 <= sound.channels <= MAX_CHANNELS or not RATES[0] <= sound.samplerate <= RATES[1]:
            return {"refused": "has a sample rate or a number of channels that is not supported"}, b""
        most, made, frames = max_seconds * sound.samplerate, bytearray(), 0
        if most < sound.frames < 1 << 62:
            return {"refused": f"is longer than {max_seconds} seconds"}, b""
        stream = soxr.ResampleStream(sound.samplerate, rate, 1) if rate not in (0, sound.samplerate) else None
        while len(block := sound.read(sound.samplerate, dtype="float32", always_2d=True)):
            frames += len(block)
            if frames > most:
                return {"refused": f"is longer than {max_seconds} seconds"}, b""
            if not numpy.isfinite(block).all():
                return {"refused": "has samples that are not numbers"}, b""
            if rate:
                mono = block.mean(1)
                made += as_int16(mono if stream is None else stream.resample_chunk(mono))
        if not frames:
            return {"refused": "has no samples"}, b""
        if frames < COMPLETE * sound.frames < 1 << 62:
            return {"refused": "is cut short"}, b""
        if stream is not None:
            made += as_int16(stream.resample_chunk(numpy.zeros(0, numpy.float32), last=True))
        return {"seconds": frames / sound.samplerate, "format": format}, bytes(made)


def as_int16(samples: Any) -> bytes:
    """Samples of -1 to 1, rounded."""
    import numpy

    made: bytes = (numpy.clip(samples, -1, 1) * 32767).round().astype("<i2").tobytes()
    return made


def lacks_samples(data: bytes) -> bool:
    """Whether a WAV file says that it has more samples than it has. One that was written to a pipe says nothing."""
    if data[:4] != b"RIFF":
        return False
    at = 12
    while at + 8 <= len(data):
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        if data[at : at + 4] == b"data":
            return size < 2**32 - 2**16 and size > len(data) - at - 8
        at += 8 + size + size % 2
    return False


def lacks_pages(data: bytes) -> bool:
    """Whether an Ogg file ends within a page, or has a stream whose last page is not marked as such."""
    if data[:4] != b"OggS":
        return False
    at = 0
    open_streams: set[bytes] = set()
    while data[at : at + 4] == b"OggS" and at + 27 <= len(data):
        begin, count = at + 27, data[at + 26]
        stream = data[at + 14 : at + 18]
        (open_streams.discard if data[at + 5] & OGG_END else open_streams.add)(stream)
        at = begin + count + sum(data[begin : begin + count])
    return at > len(data) or bool(open_streams)


def confine() -> None:
    """Limit what this process may take, whatever a medium makes it do."""
    with open("/proc/self/statm") as file:
        begun = int(file.read().split()[0]) * resource.getpagesize()
    for kind, most in (
        (resource.RLIMIT_AS, begun + MEMORY),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 16),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(kind, (most, most))


def limit_seconds(seconds: int) -> None:
    """So many more CPU seconds, then the kernel ends this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + seconds, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
