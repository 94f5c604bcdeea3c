"""`LineEditor`: the input of an interactive chat, with several lines, pasting, completion and a history on disk."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output
from prompt_toolkit.styles import Style

STYLE = Style.from_dict({"bottom-toolbar": "noreverse fg:ansibrightblack"})


class LineEditor:
    """Reads messages. Enter sends; Alt-Enter, Ctrl-J or a backslash at the end begins another line; a pasted text
    keeps its lines. ``toolbar`` gives the line below the input. ``input`` and ``output`` are for tests.
    """

    def __init__(
        self,
        history: Path | None,
        commands: Sequence[str],
        toolbar: Callable[[], str],
        input: Input | None = None,
        output: Output | None = None,
    ) -> None:
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_keys(),
            history=_history(history),
            completer=WordCompleter([f"/{name}" for name in commands], sentence=True),
            complete_while_typing=Condition(self._command_begins),
            bottom_toolbar=toolbar,
            style=STYLE,
            input=input,
            output=output,
        )

    def read(self, prefilled: str = "") -> str:
        """The next message. Raises EOFError on Ctrl-D, KeyboardInterrupt on Ctrl-C."""
        return self._session.prompt(default=prefilled)

    def _command_begins(self) -> bool:
        text = self._session.default_buffer.text
        return text.startswith("/") and not text.strip("/").isspace() and " " not in text and "\n" not in text


@contextlib.contextmanager
def keys_between_prompts() -> Iterator[None]:
    """Within this context the terminal holds back, unchanged and unseen, what is typed while no message is read, for
    the next one: else it would make a line feed of Enter and lose Ctrl-D. Ctrl-C still interrupts.
    """
    try:
        import termios
    except ImportError:  # Windows, whose consoles hold back keys
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    held = termios.tcgetattr(terminal)
    held[0] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR)  # of the input: what becomes of Enter
    held[3] &= ~(termios.ICANON | termios.ECHO)  # lines, and showing what is typed
    termios.tcsetattr(terminal, termios.TCSANOW, held)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


def history_path() -> Path:
    """Where the lines that were typed are kept, by the XDG base directory specification."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "warmturn" / "chat_history"


def _history(path: Path | None) -> History:
    """A history in a file that only this user can read, or in memory where there cannot be one."""
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys
