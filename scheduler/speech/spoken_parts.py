"""Where what a model has written down is spoken: by its timestamps; and where a window without them can end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_QUIET = 0.1  # seconds that are looked at for their loudness
_TAIL = 0.2  # part of a window in which it may be cut


class Clock(NamedTuple):
    """Tokens that say times: ``first`` is that of a window's begin, each further one is ``step`` seconds later.
    ``silence``: the token that says that nobody speaks.
    """

    first: int
    step: float
    silence: int


Span = tuple[float, float, list[int]]


def divide(ids: Sequence[int], clock: Clock | None, seconds: float, more: bool) -> tuple[list[Span], float]:
    """The spans ``(start, end, tokens)`` of what was written for a window of so many ``seconds``, and how many of them
    are used. ``more``: the sound goes on, and what has no end yet is left for the next window.
    """
    if clock is None:
        return ([(0.0, seconds, [*ids])] if ids else []), seconds
    spans: list[Span] = []
    words: list[int] = []
    last = 0.0  # what the last time was
    for token in ids:
        if token < clock.first:
            words.append(token)
            continue
        at = min(seconds, (token - clock.first) * clock.step)
        if words:
            spans.append((last, max(last, at), words))
            words = []
        last = at
    goes_on = bool(words) or (len(ids) > 1 and min(ids[-2:]) >= clock.first)  # two times: one ends, the next begins
    if more and spans and goes_on:
        return spans, last
    return ([*spans, (last, seconds, words)] if words else spans), seconds


def cut_at_quiet_place(sound: Any, rate: int) -> Any:
    """The sound up to the quietest place near its end; float32 ``[samples]``."""
    size = max(1, round(_QUIET * rate))
    begin = round((1 - _TAIL) * len(sound))
    frames = sound[begin : begin + (len(sound) - begin) // size * size].reshape(-1, size)
    if not len(frames):
        return sound
    quietest = int(np.square(frames).mean(1).argmin())
    return sound[: begin + quietest * size + size // 2]
