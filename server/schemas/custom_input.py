"""Custom tools: for the client they take plain text, for the model they are functions with one argument, ``input``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from server import surrogates

INPUT: Mapping[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
TEXT_ONLY = "Its only argument, `input`, is plain text."
HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
INSIDE = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)


def custom_description(description: str | None, syntax: str = "", grammar: str = "") -> str:
    """The description of a custom tool's function. The model is told of the ``grammar`` (``syntax``: lark or regex;
    "" for any text), and not held to it.
    """
    kind = "Lark grammar" if syntax == "lark" else "regular expression"
    told = f"{TEXT_ONLY} It follows this {kind}:\n{grammar}" if syntax else TEXT_ONLY
    return told if description is None else f"{description}\n\n{told}"


def custom_names(tools: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """The names of those functions, as templates take them, that are custom tools."""
    functions = [tool["function"] for tool in tools]
    return frozenset(
        function["name"]
        for function in functions
        if function.get("parameters") == INPUT and TEXT_ONLY in function.get("description", "")
    )


def read_json(text: str) -> Any:
    """The value of a JSON text, in which strings may have line breaks; the text itself if it is none."""
    try:
        return json.loads(surrogates.mend(text), strict=False)
    except (ValueError, RecursionError):
        return text


def arguments_with(input: str) -> str:
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
        size = inside.end() if self._ended else surrogates.settled_length(inside.group())
        read, self._waiting = self._waiting[:size], self._waiting[size:]
        value = read_json(f'"{read}"')
        if value == f'"{read}"':  # an escape that JSON does not have
            self._ended = True
        return str(value)
