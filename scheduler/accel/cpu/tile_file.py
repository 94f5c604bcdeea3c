"""`TileFile`: the weights of a model in the order in which the kernel reads them, in a file that all processes
that serve the model map.

The file begins with a table, padded to a huge page; each weight follows at a multiple of a small page. It is written
and mapped so that the file system may keep it in huge pages (ext4 and XFS of current kernels do), from which a thread
reads as fast as from memory of its own. Every weight is checked against its digest.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
import xxhash

from cache.memory import huge
from cache.whole_files import CorruptFile, open_file, read_at

Shape = tuple[int, int, int]  # experts, rows of each, elements of a row

_MARK = b"warmturn tiles 3"
_HEAD = len(_MARK) + 8 + 16  # then the length of the table, and its digest
_LONGEST = 64 << 20  # bytes of a table
_CHUNK = 8 << 20  # bytes that are written, read or hashed at a time: whole huge pages


class Tiled(Protocol):
    """A weight in tiles."""

    data: torch.Tensor
    kind: int

    @property
    def shape(self) -> Shape: ...

    @property
    def form(self) -> dict[str, Any]: ...


class KeptWeight(msgspec.Struct, frozen=True, array_like=True):
    """One weight. ``form``: what is to be known of its tiles beside their ``kind``; ``start`` is counted from the end
    of the padded table; ``digest`` is xxh3 of 128 bits.
    """

    shape: Shape
    kind: int
    form: dict[str, Any]
    start: int
    nbytes: int
    digest: str


class SmallPages(Exception):
    """The file system keeps the file in small pages, so it is slow to read."""


class TileFile:
    """``table`` of all weights by name, whose bytes ``data`` gives."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises ``CorruptFile`` for a file that is missing or is not what was written, ``SmallPages``, ``OSError``."""
        fd = open_file(folder, name)
        try:
            self.table, start = _read_table(fd)
            end = max((one.start + one.nbytes for one in self.table.values()), default=0)
            if os.fstat(fd).st_size < start + end or not end:
                raise CorruptFile("shorter than its table says")
            self._data = _map(fd, start, end)
        finally:
            os.close(fd)
        if any(_digest(self.data(one)) != one.digest for one in self.table.values()):
            raise CorruptFile("not what was written")

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(one.nbytes for one in self.table.values())

    def data(self, of: KeptWeight) -> torch.Tensor:
        """uint8 ``[nbytes]``, not to be written to."""
        return self._data[of.start : of.start + of.nbytes]


def chunks(weights: Mapping[str, Tiled]) -> Iterator[bytes | memoryview]:
    """The bytes of a file with these weights, by name."""
    table, at, views = {}, 0, [one.data.view(torch.uint8) for one in weights.values()]
    for (name, one), data in zip(weights.items(), views, strict=True):
        table[name] = KeptWeight(one.shape, one.kind, one.form, at, data.nbytes, _digest(data))
        at += -(-data.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    told = msgspec.json.encode(table)
    head = _MARK + len(told).to_bytes(8, "little") + xxhash.xxh3_128_digest(told) + told
    yield head + bytes(-len(head) % huge.HUGE)
    chunk, filled = bytearray(_CHUNK), 0
    for view in (data.numpy().data for data in views):
        padding = bytes(-len(view) % mmap.PAGESIZE)
        for part in (view, memoryview(padding)):
            while part:
                count = min(len(part), _CHUNK - filled)
                chunk[filled : filled + count] = part[:count]
                part, filled = part[count:], filled + count
                if filled == _CHUNK:
                    yield memoryview(chunk)
                    filled = 0
    yield memoryview(chunk)[:filled]
    yield bytes(-filled % huge.HUGE)


def _read_table(fd: int) -> tuple[dict[str, KeptWeight], int]:
    """The table of a file, and where the data begins. Raises ``CorruptFile``, ``OSError``."""
    head = bytes(read_at(fd, _HEAD, 0))
    length = int.from_bytes(head[len(_MARK) : len(_MARK) + 8], "little")
    if not head.startswith(_MARK) or length > min(os.fstat(fd).st_size, _LONGEST):
        raise CorruptFile("of another form")
    told = bytes(read_at(fd, length, _HEAD))
    if xxhash.xxh3_128_digest(told) != head[-16:]:
        raise CorruptFile("not what was written")
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(told, type=dict[str, KeptWeight]), -(-(_HEAD + length) // huge.HUGE) * huge.HUGE
    raise CorruptFile("of another form")


def _map(fd: int, start: int, nbytes: int) -> torch.Tensor:
    """Raises ``SmallPages``."""
    for _ in range(2):
        if (data := huge.map_file(fd, start, nbytes)) is not None:
            return data
        if hasattr(os, "posix_fadvise"):  # something else may have read it in small pages
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    raise SmallPages


def keeps_huge_pages(folder: Path) -> bool:
    """Whether a file in ``folder`` that is written like this is in huge pages. Raises ``OSError``."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        file.write(bytes(2 * huge.HUGE))
        return huge.map_file(file.fileno(), 0, 2 * huge.HUGE) is not None


def _digest(data: torch.Tensor) -> str:
    """Of its bytes, a chunk at a time, so that other threads run meanwhile."""
    found, view = xxhash.xxh3_128(), data.numpy().data
    for at in range(0, len(view), _CHUNK):
        found.update(view[at : at + _CHUNK])
    return found.hexdigest()
