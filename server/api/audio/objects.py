"""The answers to requests that turn speech into text: OpenAI's objects, and subtitles."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Literal

import msgspec

from scheduler.speech_messages import SpokenPart


class Duration(msgspec.Struct, frozen=True):
    """How much was heard, in seconds."""

    seconds: int
    type: Literal["duration"] = "duration"

    @classmethod
    def of(cls, seconds: float) -> Duration:
        """Of a sound, rounded up."""
        return cls(math.ceil(seconds))


class Transcription(msgspec.Struct, frozen=True):
    """``response_format: json``."""

    text: str
    usage: Duration


class SpokenSegment(msgspec.Struct, frozen=True):
    """A part of what was said; times are seconds from the begin of the sound."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float

    @classmethod
    def of(cls, number: int, part: SpokenPart) -> SpokenSegment:
        ratio = compression(part.text.encode())
        times = round(part.start, 3), round(part.end, 3)
        figures = round(part.logprob, 4), round(ratio, 4), round(part.no_speech, 4)
        return cls(number, int(part.start * 100), *times, part.text, part.tokens, part.temperature, *figures)


def compression(text: bytes) -> float:
    """How many times shorter a text is when it is compressed: large where it repeats itself."""
    return len(text) / len(zlib.compress(text)) if text else 0.0


class VerboseTranscription(msgspec.Struct, frozen=True):
    """``response_format: verbose_json``. ``duration`` in seconds."""

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[SpokenSegment]
    usage: Duration


class TranscriptDelta(msgspec.Struct, frozen=True):
    """What was said in one more window."""

    delta: str
    type: Literal["transcript.text.delta"] = "transcript.text.delta"


class TranscriptDone(msgspec.Struct, frozen=True):
    """The end of a stream: the whole text."""

    text: str
    usage: Duration
    type: Literal["transcript.text.done"] = "transcript.text.done"


def srt(parts: Sequence[SpokenPart]) -> str:
    """SubRip subtitles."""
    return "".join(
        f"{number}\n{clock(part.start, ',')} --> {clock(part.end, ',')}\n{part.text.strip()}\n\n"
        for number, part in enumerate(parts, 1)
    )


def vtt(parts: Sequence[SpokenPart]) -> str:
    """WebVTT subtitles."""
    lines = (f"{clock(part.start)} --> {clock(part.end)}\n{part.text.strip()}\n\n" for part in parts)
    return "WEBVTT\n\n" + "".join(lines)


def clock(seconds: float, point: str = ".") -> str:
    """``01:02:03.456``."""
    thousandths = round(seconds * 1000)
    minutes, rest = divmod(thousandths, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
