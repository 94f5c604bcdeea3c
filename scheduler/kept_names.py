"""Keeps the names that transformers reads from the source of its models, as a file in the user's cache folder, so that
it reads 2,500 files once and not at each start.

The file holds for exactly these sources: for the path, size and time of change of each, by which Python itself decides
whether a compiled module is up to date. What is damaged, or of other sources, is made anew. It imports neither
transformers nor torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

Names = dict[frozenset[str], dict[str, set[str]]]  # what has to be installed -> module -> what it exports

_DIGEST = 64  # characters


def keep_names(name: str, sources: tuple[str, ...], make: Callable[[], Names]) -> Names:
    """What ``make`` returns for files and folders ``sources``; ``name`` is the file's."""
    with suppress(OSError, ValueError, RuntimeError):  # without a folder to keep it in, or with sources that change
        key, file = stamp(sources), folder() / name
        known = read(file, key)
        if known is not None:
            return known
        made = make()
        write(file, key, made)
        return made
    return make()


def folder() -> Path:
    """The folder of such files, see ``cache.compiler.private_folder``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "warmturn"


@cache
def stamp(sources: tuple[str, ...]) -> str:
    """A digest of path, size and time of change of each file, those in folders too. Raises OSError."""
    found: list[tuple[str, int, int]] = []
    folders = []
    for source in sources:
        if os.path.isdir(source):
            folders.append(source)
        else:
            facts = os.stat(source)
            found.append((source, facts.st_size, facts.st_mtime_ns))
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir():
                    if entry.name != "__pycache__":
                        folders.append(entry.path)
                else:
                    facts = entry.stat()
                    found.append((entry.path, facts.st_size, facts.st_mtime_ns))
    return digest(repr(sorted(found)).encode())


def read(file: Path, key: str) -> Names | None:
    """The names in ``file``; None where it is not there, damaged or of other sources. Raises OSError."""
    with suppress(FileNotFoundError):
        data = file.read_bytes()
        told, body = data[: 2 * _DIGEST].decode(errors="replace"), data[2 * _DIGEST :]
        if told == key + digest(body):
            return {frozenset(needed): {m: {*names} for m, names in of.items()} for needed, of in json.loads(body)}
    return None


def write(file: Path, key: str, names: Names) -> None:
    """Replace ``file``. That it cannot be written costs a tenth of a second at the next start."""
    body = json.dumps(
        [[sorted(needed), {module: sorted(of) for module, of in each.items()}] for needed, each in names.items()]
    ).encode()
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        partial.write_bytes((key + digest(body)).encode() + body)
        partial.replace(file)


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST // 2).hexdigest()
