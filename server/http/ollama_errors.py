"""Ollama's error body, and the paths whose errors use it."""

from __future__ import annotations

import msgspec

ROUTES = "/api/"  # below: where errors are Ollama's


class OllamaError(msgspec.Struct, frozen=True):
    """Ollama's error body, also the last line of a stream that failed."""

    error: str


def speaks_ollama(path: str) -> bool:
    """Whether a path belongs to Ollama's API."""
    return path.startswith(ROUTES)
