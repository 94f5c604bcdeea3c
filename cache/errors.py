"""``first_line``: an exception as one line, for logs and error messages."""

from __future__ import annotations


def first_line(error: BaseException, most: int | None = None) -> str:
    """The first line of an error's message, at most ``most`` characters; the name of its class if the message is
    empty.
    """
    lines = str(error).strip().splitlines()
    return lines[0][:most] if lines else type(error).__name__
