"""Metadata with OpenAI's limits: pairs of strings on a session or response."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

MAX_PAIRS = 16
MAX_KEY_CHARS = 64
MAX_VALUE_CHARS = 512


def pairs(value: object) -> object:
    """Check number, keys and values of metadata. Raises ValueError."""
    if isinstance(value, dict):
        if len(value) > MAX_PAIRS:
            raise ValueError(f"can have at most {MAX_PAIRS} pairs")
        if not all(isinstance(key, str) and 1 <= len(key) <= MAX_KEY_CHARS for key in value):
            raise ValueError(f"must have keys of 1 to {MAX_KEY_CHARS} characters")
        if not all(isinstance(text, str) and len(text) <= MAX_VALUE_CHARS for text in value.values()):
            raise ValueError(f"must have strings of at most {MAX_VALUE_CHARS} characters as values")
        if any("\0" in key or "\0" in text for key, text in value.items()):
            raise ValueError("cannot contain the character NUL")  # no database would take it
    return value


Metadata = Annotated[dict[str, str], BeforeValidator(pairs)]
