"""Which libraries of the extras ``media`` and ``video`` are installed: Pillow decodes pictures and animations,
soundfile and soxr sounds, PyAV films.
"""

from __future__ import annotations

import importlib.util
from functools import cache


@cache
def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def has_pillow() -> bool:
    """Whether pictures can be decoded here."""
    return _is_installed("PIL")


def has_films() -> bool:
    """Whether videos that are no animated pictures can be decoded here."""
    return _is_installed("av")


def has_sounds() -> bool:
    """Whether sounds can be decoded here."""
    return _is_installed("soundfile") and _is_installed("soxr")
