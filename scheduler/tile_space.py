"""The room for packed weights that are kept between starts: the files in ``tiles`` in the user's cache folder, or in
``TILE_CACHE_DIR``; how much they may take, and which of them go first.

Used by the engine process, and by ``warmturn doctor`` in the server's. Imports no torch.
"""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from scheduler.disk_floor import floor
from scheduler.kept_names import folder as cache_folder

SUFFIX = ".tiles"
_VARIABLE = "TILE_CACHE_DIR"  # a container has its caches in its image, and these in a volume
_SHARE = 4  # of the free space, as a divisor


@dataclass(frozen=True)
class KeptFile:
    """The packed weights of one model."""

    path: Path
    nbytes: int
    used: float  # time of the last start that used it


def folder() -> Path:
    """Where the files are, which may not exist. Raises ``OSError`` where this user has no folder of its own."""
    wanted = os.environ.get(_VARIABLE, "")
    if os.path.isabs(wanted):
        return Path(wanted).resolve()
    try:
        return cache_folder().resolve() / "tiles"
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder") from error


def kept() -> list[KeptFile]:
    """What is kept, the least recently used first."""
    found = []
    with suppress(OSError):
        for path in folder().glob(f"*{SUFFIX}"):
            facts = path.lstat()
            found.append(KeptFile(path, facts.st_size, facts.st_mtime))
    return sorted(found, key=lambda one: one.used)


def note_use(name: str) -> None:
    """Remember that the file ``name`` is used now."""
    with suppress(OSError):
        os.utime(folder() / name)


def allowed(space: int | None) -> int:
    """Bytes that all files may take together; ``space``: what was asked for, None: a quarter of what is free. Raises
    ``OSError``.
    """
    if space is not None:
        return space
    there = folder()
    while not there.exists():
        there = there.parent
    return (shutil.disk_usage(there).free + sum(one.nbytes for one in kept())) // _SHARE


def make_room(nbytes: int, space: int | None, name: str) -> bool:
    """Remove what must go for a file ``name`` of ``nbytes``: first an older one of its model, whose name begins alike,
    then the least recently used. False where there is no room all the same. Raises ``OSError``.
    """
    model, disk = name.partition("-")[0], shutil.disk_usage(folder())
    files = sorted(kept(), key=lambda one: (not one.path.name.startswith(f"{model}-"), one.used))
    left = min(allowed(space) - sum(one.nbytes for one in files), disk.free - floor(disk.total)) - nbytes
    gone = []
    for one in files:
        if left < 0 or one.path.name.startswith(f"{model}-"):
            left += one.nbytes
            gone.append(one)
    if left < 0:
        return False
    for one in gone:
        one.path.unlink(missing_ok=True)
    return shutil.disk_usage(folder()).free - floor(disk.total) >= nbytes  # a file that is mapped takes room still
