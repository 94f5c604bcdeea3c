"""``first_line``: an exception as one line, for logs and error messages."""

from __future__ import annotations


def first_line(error: BaseException, most: int | None = None) -> str:
    """The first line of an error, ``most`` characters of it; the name of its class where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0][:most] if lines else type(error).__name__
