"""Call forms: the literal text that a model writes around the names and arguments of tool calls, and patterns for
it.
"""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import regex

from server import surrogates

NAME = r"(?P<name>[a-zA-Z0-9_-]{1,128})"
SPACE = r"\s{0,64}"  # bounded, as are names: a head that does not end is none
OBJECT = regex.compile(r'(?P<before>.*)\{\s*"(?P<key>\w+)"\s*:\s*"\Z', regex.DOTALL)
MIDDLE = regex.compile(r'"\s*,\s*"(?P<key>\w+)"\s*:\s*\Z')


@dataclass(frozen=True)
class ParameterForm:
    """Parameters written one by one: opening KEY middle VALUE closing. Values that are not strings are JSON."""

    opening: str
    middle: str
    closing: str


@dataclass(frozen=True)
class CallForm:
    """start opening NAME middle ARGUMENTS closing (separator opening NAME middle ARGUMENTS closing)* end.

    Arguments are one JSON object, or with ``parameter`` written one by one. ``several``: a reply may have more than one
    call. Parsers accept any amount of whitespace where the form has some; what is written follows it exactly.
    """

    start: str
    opening: str
    middle: str
    closing: str
    separator: str = ""
    end: str = ""
    parameter: ParameterForm | None = None
    several: bool = True

    @cached_property
    def keys(self) -> tuple[str, str] | None:
        """The keys of name and arguments in a call's JSON object; None if calls are not such objects."""
        before, middle = OBJECT.match(self.opening), MIDDLE.match(self.middle)
        if self.parameter is not None or before is None or middle is None:
            return None
        return before["key"], middle["key"]

    @cached_property
    def mark(self) -> str:
        """The text that begins the calls; "" if that is only a JSON object."""
        if self.keys is None:
            return first_line(self.start + self.opening)
        found = OBJECT.match(self.start + self.opening)
        assert found is not None
        return first_line(found["before"].rstrip("[ \t\r\n"))

    @cached_property
    def again(self) -> str:
        """The text that begins a further call after a separator; "" if that is ``mark`` again."""
        if self.mark and not self.start.strip():
            return ""
        return first_line(self.opening) if self.keys is None else "{"

    @cached_property
    def head(self) -> Any:
        """A pattern from ``mark`` to the beginning of the arguments, with a group ``name``."""
        return regex.compile(self._head(self.start + self.opening, self.mark))

    @cached_property
    def next_head(self) -> Any:
        """The same from ``again``."""
        return regex.compile(self._head(self.opening, ""))

    @cached_property
    def closings(self) -> list[str]:
        """The marks after the arguments, or after the object that contains them, in order."""
        closing = self.closing.lstrip()
        return (closing.removeprefix("}") if self.keys is not None else closing).split()

    def _head(self, opening: str, mark: str) -> str:
        if self.keys is not None:
            name, arguments = map(regex.escape, self.keys)
            colon, comma = f"{SPACE}:{SPACE}", f"{SPACE},{SPACE}"
            fields = rf'"{name}"{colon}"{NAME}"{comma}"{arguments}"{colon}(?=\{{)'
            return rf"{loosen_space(mark)}{SPACE}(?:\[{SPACE})?\{{{SPACE}{fields}"
        middle = loosen_space(self.middle)
        if self.parameter is None:
            behind = r"(?=\{)"
        elif middle:
            behind = ""
        else:
            behind = f"(?={loosen_space(self.parameter.opening)}|{loosen_space(self.closing)})"
        return rf"{loosen_space(opening)}{SPACE}{NAME}{SPACE}{middle}{SPACE if self.parameter is None else ''}{behind}"


def first_line(text: str) -> str:
    """The first non-empty line, stripped."""
    return text.strip().split("\n")[0].rstrip()


def loosen_space(text: str) -> str:
    """A pattern for a literal that accepts any amount of whitespace where the literal has some."""
    return r"\s{1,64}".join(regex.escape(word) for word in text.split())


def parse_calls(text: str, keys: tuple[str, str], tools: Container[str]) -> list[tuple[str, str]] | None:
    """Names and arguments of the calls in a JSON text: one object, or a list of them. None for anything else."""
    try:
        value = surrogates.read(text)
    except (ValueError, RecursionError):
        return None
    calls = []
    for item in value if isinstance(value, list) else [value]:
        name = item.get(keys[0]) if isinstance(item, dict) else None
        if not isinstance(name, str) or name not in tools:
            return None
        arguments = item.get(keys[1], {})
        if isinstance(arguments, str):  # JSON within JSON
            calls.append((name, surrogates.mend(arguments)))
        elif isinstance(arguments, dict):
            calls.append((name, json.dumps(arguments, ensure_ascii=False)))
        else:
            return None
    return calls or None
