"""The interface of reply parsers, which split streamed text into reasoning, content and tool calls; and the plain
one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins, the ``index``-th of its reply."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """More of the arguments of call ``index``: a piece of a JSON text."""

    index: int
    text: str


Part = ReasoningPiece | ContentPiece | CallStart | ArgumentsPiece


class ReplyParser(Protocol):
    """Reads one reply. ``feed`` every piece of its text, then ``finish`` once; what they return, in order, is the
    reply: reasoning, content and calls, nothing twice, nothing of it left out but the marks between them."""

    def feed(self, text: str) -> list[Part]:
        """What can be told of the text so far. Never raises: text that breaks its own marks is content."""

    def finish(self) -> list[Part]:
        """What was held back."""


class PlainParser:
    """Everything is content."""

    def feed(self, text: str) -> list[Part]:
        return [ContentPiece(text)] if text else []

    def finish(self) -> list[Part]:
        return []
