"""The input of a custom tool: plain text for the client, and for the model the argument ``input`` of a function."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from server import surrogates

HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
INSIDE = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)


def read_json(text: str) -> Any:
    """The value of a JSON text, in which strings may have line breaks; the text itself if it is none."""
    try:
        return json.loads(surrogates.mended(text), strict=False)
    except (ValueError, RecursionError):
        return text


def arguments_with(input: str) -> str:
    """The arguments of a call with this input."""
    return json.dumps({"input": input}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """The input of a call: the argument ``input``, or the only other one; of arguments that end early what is there of
    it; else the whole text.
    """
    value = read_json(arguments)
    if isinstance(value, Mapping):
        given = value.get("input", next(iter(value.values())) if len(value) == 1 else None)
        return given if isinstance(given, str) else arguments
    stream = InputStream()
    begun = stream.feed(arguments)
    return begun if stream.begun else arguments


class InputStream:
    """Reads the input from arguments that come piece by piece."""

    def __init__(self) -> None:
        self.begun = False  # ``input`` is the first argument, and a text
        self._waiting = ""  # of the arguments, what is not told yet
        self._ended = False

    def feed(self, piece: str) -> str:
        """What a piece of the arguments adds to the input."""
        if self._ended:
            return ""
        self._waiting += piece
        if not self.begun:
            head = HEAD.match(self._waiting)
            if head is None:
                return ""
            self.begun = True
            self._waiting = self._waiting[head.end() :]
        inside = INSIDE.match(self._waiting)
        assert inside is not None  # it matches the empty text too
        self._ended = self._waiting[inside.end() :].startswith('"')
        size = inside.end() if self._ended else surrogates.settled(inside.group())
        read, self._waiting = self._waiting[:size], self._waiting[size:]
        value = read_json(f'"{read}"')
        if value == f'"{read}"':  # an escape that JSON does not have
            self._ended = True
        return str(value)
