"""The headers of GGUF files, each of which is read once, and the files of a model that is split. Needs no torch."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path
from typing import Any

from scheduler.gguf_reader import GgufError as GgufError
from scheduler.gguf_reader import GgufHeader, read_header
from scheduler.weights.known_files import identity

_known: dict[tuple[int, ...], GgufHeader] = {}  # by what tells files apart
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def read_once(facts: os.stat_result, data: mmap.mmap) -> GgufHeader:
    """The header of the file that ``facts`` are of, which nobody may change: it is read once, until ``forget_headers``.
    Raises ``GgufError``.
    """
    key = identity(facts)
    if key not in _known:
        _known[key] = read_header(data)
    return _known[key]


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a model in one file or several. Raises ``OSError`` or ``GgufError``."""
    with path.open("rb") as file:
        facts = os.fstat(file.fileno())
        if not facts.st_size:
            raise GgufError("the file is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return read_once(facts, data).metadata


def forget_headers() -> None:
    """Give their memory back: a vocabulary has hundreds of thousands of words."""
    _known.clear()


def split_names(name: str) -> list[str]:
    """The names of the files of a model whose first or only file is ``name``. Raises ``GgufError`` where it is not the
    first one.
    """
    found = _SPLIT.fullmatch(name)
    if found is None:
        return [name]
    if int(found["number"]) != 1:
        raise GgufError("the file is not the first part of its model; name the one with -00001-of-")
    count = int(found["count"])
    return [f"{found['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def split_parts(path: Path) -> list[Path]:
    """The files of the model whose first or only file is ``path``. Raises ``GgufError`` where one of them is missing,
    or where ``path`` is not the first one.
    """
    parts = [path.with_name(name) for name in split_names(path.name)]
    if len(parts) > 1 and (lacking := sum(not part.is_file() for part in parts)):
        raise GgufError(f"{lacking} of the {len(parts)} files of the model are missing")
    return parts
