"""``first_line``: an exception as one line, for logs and error messages."""

from __future__ import annotations


def first_line(error: BaseException, most: int | None = None) -> str:
    """The first line of an error's message, with the next one if it ends with a colon, at most ``most`` characters; the
    name of its class if the message is empty.
    """
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    if lines[0].endswith(":") and len(lines) > 1:
        lines[0] += f" {lines[1].strip()}"
    return lines[0][:most]
