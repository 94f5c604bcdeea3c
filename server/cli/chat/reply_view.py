"""`ReplyView`: where a reply is shown as it arrives: Markdown in a terminal, plain text elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol, TextIO

from markdown_it import MarkdownIt
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import SegmentLines

from server.cli.chat.streamed_turn import ReplyPiece

DRAW_SECONDS = 0.08  # between two drawings of the block that is being written
BLOCKS = MarkdownIt("commonmark").enable("table")
# What a terminal would obey instead of showing it, but for new lines and tabs.
CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class ReplyView(Protocol):
    """Where replies and notes about them are shown."""

    def replying(self) -> contextlib.AbstractContextManager[ShownReply]:
        """A reply that is about to arrive; when the context ends, all of it is shown."""
        ...

    def note(self, text: str) -> None:
        """A line of the program's own."""
        ...

    def show(self, text: str) -> None:
        """A finished text of the conversation."""
        ...


class ShownReply(Protocol):
    """A reply that is being shown."""

    def add(self, piece: ReplyPiece) -> None:
        """More of it."""
        ...


class PlainView:
    """Text as it comes to ``out``, notes to ``notes`` if there is one. Reasoning is not shown."""

    def __init__(self, out: TextIO, notes: TextIO | None) -> None:
        self._out = out
        self._notes = notes
        self._open = False  # a line of the reply has no end yet

    @contextlib.contextmanager
    def replying(self) -> Iterator[PlainView]:
        try:
            yield self
        finally:
            self._end_line()

    def add(self, piece: ReplyPiece) -> None:
        if piece.reasoning:
            return
        self._out.write(piece.text)
        self._out.flush()
        self._open = not piece.text.endswith("\n")

    def show(self, text: str) -> None:
        self._out.write(f"{text}\n")

    def note(self, text: str) -> None:
        if self._notes is not None:
            self._notes.write(f"{text}\n")
            self._notes.flush()

    def _end_line(self) -> None:
        if self._open:
            self._out.write("\n")
            self._out.flush()
        self._open = False


class MarkdownView:
    """Markdown in a terminal. A block is printed for good when the next one begins; the last one is drawn anew as it
    grows. Reasoning is printed in dim text."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextlib.contextmanager
    def replying(self) -> Iterator[MarkdownReply]:
        reply = MarkdownReply(self._console)
        try:
            yield reply
        finally:
            reply.close()

    def show(self, text: str) -> None:
        self._console.print(Markdown(visible(text)))

    def note(self, text: str) -> None:
        self._console.print(visible(text), style="dim", markup=False, highlight=False, soft_wrap=True)


class MarkdownReply:
    """One reply of a `MarkdownView`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tail = ""  # the text behind the last block that is printed
        self._live: Live | None = None
        self._drawn = 0.0
        self._reasoning = False
        self._blocks = 0

    def add(self, piece: ReplyPiece) -> None:
        text = visible(piece.text)
        if piece.reasoning:
            self._reasoning = True
            self._console.print(text, end="", style="dim italic", markup=False, highlight=False, soft_wrap=True)
            return
        self._end_reasoning()
        self._tail += text
        if time.monotonic() - self._drawn >= DRAW_SECONDS:
            self._draw()

    def close(self) -> None:
        """Print what is left."""
        self._end_reasoning()
        self._end_live()
        if self._tail.strip():
            self._print(self._tail)
        self._tail = ""

    def _draw(self) -> None:
        done, self._tail = split_last_block(self._tail)
        if done.strip():
            self._end_live()
            self._print(done)
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        lines = self._console.render_lines(Markdown(self._tail), pad=False)
        self._live.update(SegmentLines(lines[-max(1, self._console.height - 2) :], new_lines=True), refresh=True)
        self._drawn = time.monotonic()

    def _print(self, text: str) -> None:
        if self._blocks:
            self._console.print()
        self._console.print(Markdown(text))
        self._blocks += 1

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
        self._live = None

    def _end_reasoning(self) -> None:
        if self._reasoning:
            self._console.print("\n")
        self._reasoning = False


def split_last_block(text: str) -> tuple[str, str]:
    """Markdown before its last block, and that block, which may still grow."""
    starts = [token.map[0] for token in BLOCKS.parse(text) if token.level == 0 and token.map and token.nesting >= 0]
    if len(starts) < 2:
        return "", text
    lines = text.splitlines(keepends=True)
    return "".join(lines[: starts[-1]]), "".join(lines[starts[-1] :])


def visible(text: str) -> str:
    """The text without characters that control a terminal."""
    return text.translate(CONTROLS)
