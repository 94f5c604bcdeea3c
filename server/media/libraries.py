"""Which libraries of the extras ``media`` and ``video`` are installed: Pillow decodes pictures and animations,
soundfile and soxr sounds, PyAV films.
"""

from __future__ import annotations

import importlib.util


def has_pillow() -> bool:
    """Whether pictures can be decoded here."""
    return importlib.util.find_spec("PIL") is not None


def has_films() -> bool:
    """Whether videos that are no animated pictures can be decoded here."""
    return importlib.util.find_spec("av") is not None


def has_sounds() -> bool:
    """Whether sounds can be decoded here."""
    return all(importlib.util.find_spec(name) is not None for name in ("soundfile", "soxr"))
