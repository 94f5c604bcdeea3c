"""`KnownFiles`: what earlier starts found out about the files of a model, so that they need not be read as a whole.

It is kept beside the packed weights (``scheduler.tile_space``), under the device, number, size and times of change of
each file, by which git and make too decide whether a file is still the same. The time of the last change of its status
cannot be set by programs on the usual file systems. Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from cache.whole_files import CorruptFile, check_private, make_private, open_file, write_file
from scheduler import tile_space

_FORM = 1  # of what a digest is of
_SETTLED = 2.0  # seconds since the last change: two changes within one tick of a clock cannot be told apart
_MOST = 256  # models that are remembered
_LARGEST = 1 << 16  # bytes of what is known of one
_DIGEST = re.compile("[0-9a-f]{32}")


class KnownFiles(msgspec.Struct, frozen=True):
    """``digest`` is that of the weights with the configuration whose digest is ``config``; ``tiles`` the name of the
    file that has them packed, see ``scheduler.tile_space``, or empty.
    """

    config: str
    digest: str
    tiles: str = ""


@dataclass(frozen=True)
class OpenedFile:
    """A file, and what was true of it when it was opened."""

    path: Path
    facts: os.stat_result
    at: float = field(default_factory=time.time)

    @property
    def settled(self) -> bool:
        """Whether its last change was so long ago that a later one would have another time."""
        return max(self.facts.st_mtime, self.facts.st_ctime) < self.at - _SETTLED

    @property
    def unchanged(self) -> bool:
        """Whether there is still that file, as it was. Raises ``OSError``."""
        return identity(os.stat(self.path)) == identity(self.facts)


def digest_of(files: Sequence[OpenedFile], config: str, make: Callable[[], str]) -> str:
    """What ``make`` returns, which reads every byte of the open ``files``, or has for these very files and this
    configuration at an earlier start.
    """
    wanted = hashlib.blake2b(f"{_FORM} {config}".encode(), digest_size=16).hexdigest()
    name = _name([one.facts for one in files])
    known = _read(name)
    if known is not None and known.config == wanted:
        return known.digest
    made = make()
    with suppress(OSError):
        if all(one.settled and one.unchanged for one in files):
            _write(name, KnownFiles(wanted, made))
    return made


def known_of(paths: Sequence[Path]) -> KnownFiles | None:
    """What is known of files as they are now."""
    with suppress(OSError):
        return _read(_name([os.stat(path) for path in paths]))
    return None


def note_tiles(digest: str, name: str) -> None:
    """Remember of all files with that digest which file has them packed; empty: none."""
    with suppress(OSError):
        for path in _folder().glob("*.json"):
            known = _read(path.stem)
            if known is not None and known.digest == digest and known.tiles != name:
                _write(path.stem, msgspec.structs.replace(known, tiles=name))


def identity(facts: os.stat_result) -> tuple[int, ...]:
    """What tells a file, as it was, from all others."""
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _name(facts: Sequence[os.stat_result]) -> str:
    """Of what is known of these files."""
    return hashlib.blake2b(repr([identity(one) for one in facts]).encode(), digest_size=16).hexdigest()


def _folder() -> Path:
    """Raises ``OSError``."""
    return tile_space.folder() / "files"


def _read(name: str) -> KnownFiles | None:
    """None where nothing is known, or what is there cannot be trusted."""
    with suppress(OSError, CorruptFile, msgspec.MsgspecError):
        folder = _folder()
        check_private(folder)
        with os.fdopen(open_file(folder, f"{name}.json"), "rb") as file:
            known = msgspec.json.decode(file.read(_LARGEST), type=KnownFiles)
        if _DIGEST.fullmatch(known.digest) and known.tiles == os.path.basename(known.tiles):
            return known
    return None


def _write(name: str, known: KnownFiles) -> None:
    """That it cannot be written costs some seconds at the next start."""
    with suppress(OSError, CorruptFile):
        folder = make_private(_folder())
        write_file(folder, f"{name}.json", [msgspec.json.encode(known)])
        for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-_MOST]:
            path.unlink(missing_ok=True)
