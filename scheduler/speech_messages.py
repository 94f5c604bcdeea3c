"""Messages about speech between server and engine, of ``scheduler.protocol``, and what the engine tells of a model that
turns speech into text.
"""

from __future__ import annotations

import msgspec


class SpeechFacts(msgspec.Struct, frozen=True):
    """What a model that turns speech into text takes. ``rate``: samples per second. ``window``: seconds that it hears
    at once. ``languages``: codes by which a request may name the language that is spoken; none where the model is not
    told. ``translates``: into English. ``timestamps``: it says when its sentences are spoken. ``prompts``: it takes a
    text that goes before. ``together``: how many windows it hears in one batch.
    """

    rate: int
    window: float
    languages: tuple[str, ...] = ()
    translates: bool = False
    timestamps: bool = False
    prompts: bool = False
    together: int = 1


class Transcribe(msgspec.Struct, frozen=True, tag=True):
    """One window of a sound to write down. ``samples``: int16, little-endian, mono, at the model's rate; at most its
    window. ``more``: the sound goes on behind them. ``language``: one of the model's, or "": it finds out.
    ``translate``: into English. ``prompt``: a text that goes before. ``timestamps``: tell when what is said. Answered
    by ``Transcribed``.
    """

    request: str
    samples: bytes
    more: bool = False
    language: str = ""
    translate: bool = False
    prompt: str = ""
    temperature: float = 0.0
    timestamps: bool = False


class SpokenPart(msgspec.Struct, frozen=True):
    """A part of what is said in a window. ``start`` and ``end``: seconds from the window's begin. ``tokens``: its ids.
    ``logprob``: mean log-probability of all that was generated for the window. ``no_speech``: the model's probability
    that nobody speaks in it; 0 where it does not tell. ``temperature``: at which it was drawn.
    """

    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    logprob: float
    no_speech: float = 0.0
    temperature: float = 0.0


class Transcribed(msgspec.Struct, frozen=True, tag=True):
    """The answer to ``Transcribe``. ``used``: seconds of the window that the parts cover: the next window begins there.
    ``language``: that was found or named. ``error``: why it failed, a sentence for the client; then there are no parts.
    """

    request: str
    parts: tuple[SpokenPart, ...] = ()
    used: float = 0.0
    language: str = ""
    error: str = ""
