"""`KnownFiles`: what earlier starts found out about the files of a model, so that they need not be read as a whole.

It is kept beside the packed weights (``scheduler.tile_space``), under the device, number, size and times of change of
each file, by which git and make too decide whether a file is still the same. Whoever changes a file changes one of
them: the time of the last change of its status cannot be set. Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from cache.whole_files import make_folder
from scheduler import tile_space

_SETTLED = 2.0  # seconds since the last change: two changes within one tick of a clock cannot be told apart
_MOST = 256  # models that are remembered


class KnownFiles(msgspec.Struct, frozen=True):
    """``digest`` is that of the weights with the configuration whose digest is ``config``; ``tiles`` the name of the
    file that has them packed, see ``scheduler.tile_space``, or empty.
    """

    config: str
    digest: str
    tiles: str = ""


def digest_of(paths: Sequence[Path], config: str, make: Callable[[], str]) -> str:
    """What ``make`` returns, which reads every byte of ``paths``, or has for these very files and this
    configuration at an earlier start.
    """
    wanted = hashlib.blake2b(config.encode(), digest_size=16).hexdigest()
    with suppress(OSError):
        before = stamp(paths)
        known = read(before)
        if known is not None and known.config == wanted:
            return known.digest
        began = time.time()
        made = make()
        last = max(max(facts.st_mtime, facts.st_ctime) for facts in map(os.stat, paths))
        if stamp(paths) == before and last < began - _SETTLED:
            _write(before, KnownFiles(wanted, made))
        return made
    return make()


def stamp(paths: Sequence[Path]) -> str:
    """A name for files as they are now. Raises ``OSError``."""
    found = [
        (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
        for facts in map(os.stat, paths)
    ]
    return hashlib.blake2b(repr(found).encode(), digest_size=16).hexdigest()


def read(stamped: str) -> KnownFiles | None:
    """What is known of files; None where nothing is, or it cannot be read."""
    try:
        return msgspec.json.decode((_folder() / f"{stamped}.json").read_bytes(), type=KnownFiles)
    except (OSError, msgspec.MsgspecError):
        return None


def note_tiles(digest: str, name: str) -> None:
    """Remember of all files with that digest which file has them packed."""
    with suppress(OSError):
        for path in _folder().glob("*.json"):
            known = read(path.stem)
            if known is not None and known.digest == digest:
                _write(path.stem, msgspec.structs.replace(known, tiles=name))


def _folder() -> Path:
    return tile_space.folder() / "files"


def _write(stamped: str, known: KnownFiles) -> None:
    """That it cannot be written costs some seconds at the next start."""
    folder = _folder()
    with suppress(OSError):
        make_folder(folder)
        partial = folder / f".{stamped}.{os.getpid()}"
        partial.write_bytes(msgspec.json.encode(known))
        partial.replace(folder / f"{stamped}.json")
        for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-_MOST]:
            path.unlink(missing_ok=True)
