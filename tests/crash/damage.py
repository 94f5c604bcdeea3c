"""Damages as disks, crashes and people make them: to one file of a folder, or to the whole folder."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

Kind = Callable[[random.Random, Path, Path], str]


def flip_bit(rng: random.Random, folder: Path, older: Path) -> str:
    path = some_file(rng, folder)
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data))
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return f"bit flipped in byte {at} of {path.name}"


def truncate(rng: random.Random, folder: Path, older: Path) -> str:
    """The end of one file is missing, or all of it."""
    path = some_file(rng, folder)
    size = rng.choice((0, rng.randrange(path.stat().st_size), path.stat().st_size - 1))
    with path.open("r+b") as file:
        file.truncate(size)
    return f"{path.name} cut to {size} bytes"


def lengthen(rng: random.Random, folder: Path, older: Path) -> str:
    """Something was appended to one file."""
    path = some_file(rng, folder)
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.choice((1, 64, 4096))))
    return f"{path.name} lengthened"


def zero_range(rng: random.Random, folder: Path, older: Path) -> str:
    """A range that was never written: zeros in the middle or to the end."""
    path = some_file(rng, folder)
    data = bytearray(path.read_bytes())
    first = rng.randrange(len(data))
    stop = min(len(data), first + rng.choice((1, 512, 4096, len(data))))
    data[first:stop] = bytes(stop - first)
    path.write_bytes(data)
    return f"{path.name} is zero in [{first}, {stop})"


def swap(rng: random.Random, folder: Path, older: Path) -> str:
    """Two files have changed places; a file that is alone has moved to the name of nobody."""
    files = files_of(folder)
    if len(files) < 2:
        return truncate(rng, folder, older)
    one, two = rng.sample(files, 2)
    spare = one.with_name("swap")
    one.rename(spare)
    two.rename(one)
    spare.rename(two)
    return f"{one.name} and {two.name} swapped"


def remove(rng: random.Random, folder: Path, older: Path) -> str:
    path = some_file(rng, folder)
    path.unlink()
    return f"{path.name} removed"


def old_file(rng: random.Random, folder: Path, older: Path) -> str:
    """One file is what it was a while ago: another content, or not there yet."""
    path = some_file(rng, folder)
    then = older / path.relative_to(folder)
    path.unlink()
    if then.exists():
        shutil.copy2(then, path)
    return f"{path.name} as it was"


def old_folder(rng: random.Random, folder: Path, older: Path) -> str:
    """The whole folder is what it was a while ago."""
    shutil.rmtree(folder)
    shutil.copytree(older, folder)
    return "the folder as it was"


KINDS: tuple[Kind, ...] = (flip_bit, truncate, lengthen, zero_range, swap, remove, old_file, old_folder)
WEIGHTS = (8, 4, 1, 4, 4, 1, 4, 1)


def damage(rng: random.Random, folder: Path, older: Path) -> str:
    """Damage ``folder``, of which ``older`` is a copy from a while ago; what was done. At least one file must have
    content. Some damages change nothing by chance: two equal files swapped, zeros over zeros.
    """
    kind = rng.choices(KINDS, WEIGHTS)[0]
    return kind(rng, folder, older)


def files_of(folder: Path) -> list[Path]:
    """All files with content, in an order that is the same each time."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 0)


def some_file(rng: random.Random, folder: Path) -> Path:
    return rng.choice(files_of(folder))


def content_of(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
