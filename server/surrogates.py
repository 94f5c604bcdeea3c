"""Lone surrogates in JSON text: JSON can escape half of a surrogate pair, UTF-8 cannot encode it. They are replaced by
U+FFFD.
"""

from __future__ import annotations

import json
import re
from typing import Any

# An escape of JSON: a pair, half of one, or any other. Read from left to right, as "\\ud83d" escapes a backslash.
ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
# What may become an escape of a whole pair, at the end of a text that still comes.
UNFINISHED = re.compile(r"\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?))?\Z")


def mend(text: str) -> str:
    r"""A JSON text in which no half of a pair is escaped: ``\ufffd`` stands in its place. Any other text stays."""
    if "\\u" not in text:
        return text
    return ESCAPE.sub(lambda found: found[0] if found[1] is None else r"\ufffd", text)


def settled_length(text: str) -> int:
    """How many leading characters of a streamed JSON text ``mended`` can be applied to: all but a trailing escape that
    is incomplete or whose second half may still come.
    """
    at = 0
    for found in ESCAPE.finditer(text):
        if UNFINISHED.match(text, found.start()):
            return found.start()
        at = found.end()
    rest = text.find("\\", at)
    return len(text) if rest < 0 else rest


def read(text: str) -> Any:
    """``json.loads``, with lone surrogates replaced. Raises ValueError and RecursionError."""
    return json.loads(mend(text))


def without(text: str) -> str:
    """``text`` with lone surrogates replaced; for strings that other code has decoded."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
