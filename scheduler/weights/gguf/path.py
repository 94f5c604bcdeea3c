"""Finds the GGUF file that a model's name means: on this machine, or in a repository of the hub."""

from __future__ import annotations

from pathlib import Path

from scheduler.weights.gguf.header import split_names

_SUFFIX = ".gguf"


def find_file(model: str) -> Path | None:
    """The GGUF file that ``model`` names, the first one if it is split, fetched if it is a hub repository's; None for
    another kind of model. Raises ``FileNotFoundError`` for one that is not there, ``OSError`` for one that cannot be
    fetched.
    """
    path = Path(model)
    if path.suffix != _SUFFIX:
        return None
    if path.is_file():
        return path
    if path.is_absolute() or len(path.parts) != 3 or path.parent.exists():  # not OWNER/REPOSITORY/FILE
        raise FileNotFoundError(f"there is no file {path}")
    from transformers.utils import cached_file

    fetched = [Path(str(cached_file(str(path.parent), name))) for name in split_names(path.name)]
    return fetched[0]
