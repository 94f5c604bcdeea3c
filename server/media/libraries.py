"""Which libraries of the extra ``media`` are installed: Pillow decodes pictures, soundfile and soxr sounds."""

from __future__ import annotations

import importlib.util


def has_pillow() -> bool:
    """Whether pictures can be decoded here."""
    return importlib.util.find_spec("PIL") is not None


def has_sounds() -> bool:
    """Whether sounds can be decoded here."""
    return all(importlib.util.find_spec(name) is not None for name in ("soundfile", "soxr"))
