"""The interface of reply parsers, which split streamed text into reasoning, content and tool calls; and the plain
one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """Reasoning text."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """Content text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of a tool call, the ``index``-th of its reply."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """A piece of the JSON arguments of call ``index``."""

    index: int
    text: str


Part = ReasoningPiece | ContentPiece | CallStart | ArgumentsPiece


class ReplyParser(Protocol):
    """Parses one reply. Call ``feed`` with each piece of its text, then ``finish`` once. Together they return the whole
    reply in order, as reasoning, content and calls, without the marks between them.
    """

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain so far. Never raises: text with broken marks is content."""

    def finish(self) -> list[Part]:
        """The rest, which was held back."""


class PlainParser:
    """A parser for which all text is content."""

    def feed(self, text: str) -> list[Part]:
        return [ContentPiece(text)] if text else []

    def finish(self) -> list[Part]:
        return []
