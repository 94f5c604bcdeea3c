"""The HTTP API: one sub-package per family of endpoints.

Each has its routes, request schemas, answer structs and reply writers. A module with endpoints has a ``router``; the
app finds them here. They may import each other in the order ops, openai, sessions, responses, anthropic, ollama,
batches, audio, and everything below ``server.turns``; nothing below may import them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection, Iterator
from functools import cache

from fastapi import APIRouter


def routers(without: Collection[str] = ()) -> Iterator[APIRouter]:
    """The routers of all endpoints, by the names of their modules; ``without`` these sub-packages."""
    for name in _modules():
        if name.removeprefix(f"{__name__}.").partition(".")[0] in without:
            continue
        if isinstance(router := getattr(importlib.import_module(name), "router", None), APIRouter):
            yield router


@cache
def _modules() -> tuple[str, ...]:
    """The names of all modules of this package, sorted."""
    return tuple(sorted(module.name for module in pkgutil.walk_packages(__path__, f"{__name__}.")))
