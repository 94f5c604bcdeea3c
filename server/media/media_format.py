"""The format of a medium by its first bytes, whatever it is called."""

from __future__ import annotations

from cache.media_frames import FRAMES
from server.media.media import MediaKind
from server.media.media_limits import MediaRefused

IMAGES = "PNG, JPEG, WebP or GIF"
VIDEOS = "MP4, WebM, or animated GIF, WebP or PNG"
SOUNDS = "WAV, FLAC, Ogg or MP3"


def format_of(data: bytes, kind: MediaKind) -> str:
    """The format of a picture or a sound. Raises MediaRefused for any other content."""
    if kind == "audio":
        return sound_format(data)
    if kind == "video":
        return video_format(data)
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "gif"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    raise MediaRefused(f"is not a {IMAGES} image")


def video_format(data: bytes) -> str:
    """The format of a video. Raises MediaRefused for any other content."""
    if data.startswith(FRAMES):
        return "frames"
    if data[4:8] == b"ftyp":
        return "mp4"
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return "webm"
    try:
        format = format_of(data, "image")
    except MediaRefused:
        format = "jpeg"
    if format == "jpeg":
        raise MediaRefused(f"is not {VIDEOS} video")
    return format


def sound_format(data: bytes) -> str:
    """The format of a sound. Raises MediaRefused for any other content."""
    if data[:4] in (b"RIFF", b"RIFX", b"RF64") and data[8:12] == b"WAVE":
        return "wav"
    if data.startswith(b"fLaC"):
        return "flac"
    if data.startswith(b"OggS"):
        return "ogg"
    if data.startswith(b"ID3") or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 in (0xE2, 0xE4, 0xE6)):
        return "mp3"
    raise MediaRefused(f"is not {SOUNDS} audio")
