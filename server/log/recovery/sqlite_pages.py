"""Reads records from the intact pages of a damaged SQLite file and from its write-ahead log, without SQLite.

Follows SQLite's file format (https://www.sqlite.org/fileformat2.html) page by page, without using the schema or the
trees. Nothing is written.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

from server.log.recovery.wal import PAGE_SIZE, WAL_MAGIC, Wal

MAGIC = b"SQLite format 3\0"
TABLE_LEAF, INDEX_LEAF, INDEX_INTERIOR = 0x0D, 0x0A, 0x02

Value = int | float | str | bytes | None
Place = tuple[int, int]  # page, cell


class SqliteRecord(NamedTuple):
    """A record of a table; without ``rowid``, of an index."""

    place: Place
    rowid: int | None
    values: tuple[Value, ...]


class DatabaseImage:
    """The readable pages of a database as of its last commit. ``torn``: parts of the write-ahead log are lost, so pages
    can be of different times.
    """

    def __init__(self, path: Path) -> None:
        """Open the file and those beside it; their kinds are found by content, not by name."""
        self._files: list[int] = []
        beside = [Path(f"{path}{suffix}") for suffix in ("", "-wal", "-shm", "-starts")]
        starts = {one: head_of(one) for one in beside}
        main = next((one for one in beside if starts[one].startswith(MAGIC)), path)
        logs = [one for one in beside if starts[one].startswith(WAL_MAGIC)]
        log = next(iter(logs), beside[1])
        self.is_database = starts[main].startswith(MAGIC) or bool(logs)
        self.wal = Wal(log, beside[2])
        self.torn = not self.wal.sound
        declared = int.from_bytes(starts[main][16:18], "big") if starts[main].startswith(MAGIC) else 0
        size = self.wal.page_size or (65536 if declared == 1 else declared)
        self._size = size if size in {2**bits for bits in range(9, 17)} else PAGE_SIZE
        self._main = self._open(main if main != log else None)
        self._log = self._open(log)
        self._bytes = 0 if self._main is None else os.fstat(self._main).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            os.close(file)

    def records(self) -> Iterator[SqliteRecord]:
        """Every record that can be decoded. Those of damaged pages can have any content."""
        for number in sorted({*range(1, -(-self._bytes // self._size) + 1), *self.wal.frames}):
            page = self._page(number)
            count = cells_on(page, number)
            for cell in range(count):
                record = self._decode(page, (number, cell))
                if record is not None:
                    yield record

    def record(self, place: Place) -> SqliteRecord | None:
        """Read one record again."""
        return self._decode(self._page(place[0]), place)

    def is_empty(self) -> bool:
        """Whether there are only zeros."""
        pages = range(1, -(-self._bytes // self._size) + 1)
        return not self.wal.frames and not any(any(self._page(number)) for number in pages)

    def _open(self, path: Path | None) -> int | None:
        try:
            if path is None or not path.is_file():
                return None
            self._files.append(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
        except OSError:
            return None
        return self._files[-1]

    def _page(self, number: int) -> bytes:
        """A page, empty where it is not there or cannot be read."""
        at = self.wal.frames.get(number)
        file, offset = (self._main, (number - 1) * self._size) if at is None else (self._log, at)
        try:
            return b"" if file is None else os.pread(file, self._size, offset)
        except OSError:
            return b""

    def _decode(self, page: bytes, place: Place) -> SqliteRecord | None:
        try:
            number, cell = place
            head = 100 if number == 1 else 0
            kind = page[head]
            at = int.from_bytes(page[(at := head + (12 if kind == INDEX_INTERIOR else 8) + 2 * cell) : at + 2], "big")
            at += 4 if kind == INDEX_INTERIOR else 0
            size, at = varint(page, at)
            rowid = None
            if kind == TABLE_LEAF:
                rowid, at = varint(page, at)
            return SqliteRecord(place, rowid, decode(self._payload(page, at, size, kind)))
        except (IndexError, ValueError, struct.error):
            return None

    def _payload(self, page: bytes, at: int, size: int, kind: int) -> bytes:
        """The bytes of a record, gathered from the pages that they overflow to. Raises ValueError."""
        usable = self._size
        most = usable - 35 if kind == TABLE_LEAF else (usable - 12) * 64 // 255 - 23
        if size > most:
            least = (usable - 12) * 32 // 255 - 23
            here = least + (size - least) % (usable - 4)
            here = here if here <= most else least
        else:
            here = size
        payload = bytearray(page[at : at + here])
        following = int.from_bytes(page[at + here : at + here + 4], "big") if here < size else 0
        while len(payload) < size and following:
            page = self._page(following)
            if len(page) < usable:
                break
            following = int.from_bytes(page[:4], "big")
            payload += page[4 : 4 + size - len(payload)]
        if len(payload) != size:
            raise ValueError("a record is cut")
        return bytes(payload)


def head_of(path: Path) -> bytes:
    """The first bytes of a regular file; empty if it does not exist or cannot be read."""
    try:
        if path.is_symlink() or not path.is_file():
            return b""
        with path.open("rb", buffering=0) as file:
            return file.read(32)
    except OSError:
        return b""


def cells_on(page: bytes, number: int) -> int:
    """How many records a page has; 0 for pages without records."""
    head = 100 if number == 1 else 0
    if len(page) <= head + 8 or page[head] not in (TABLE_LEAF, INDEX_LEAF, INDEX_INTERIOR):
        return 0
    return min(int.from_bytes(page[head + 3 : head + 5], "big"), len(page) // 2)


def varint(data: bytes, at: int) -> tuple[int, int]:
    """SQLite's varint of 1 to 9 bytes at ``at``, and the offset after it. Raises IndexError."""
    value = 0
    for count in range(9):
        byte = data[at + count]
        value = value << 8 | byte if count == 8 else value << 7 | byte & 0x7F
        if byte < 0x80 or count == 8:
            return (value - 2**64 if value >= 2**63 else value), at + count + 1
    raise AssertionError


INTEGERS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}  # bytes, by type


def decode(payload: bytes) -> tuple[Value, ...]:
    """The columns of a record. Raises ValueError, IndexError or struct.error for invalid data."""
    end, at = varint(payload, 0)
    body = end
    values: list[Value] = []
    while at < end:
        kind, at = varint(payload, at)
        size = INTEGERS.get(kind, 0) if kind < 7 else 8 if kind == 7 else max(0, kind - 12) // 2
        data = payload[body : body + size]
        if len(data) != size or kind < 0:
            raise ValueError("a record is cut")
        body += size
        values.append(value_of(kind, data))
    if at != end or body != len(payload):
        raise ValueError("a record contradicts itself")
    return tuple(values)


def value_of(kind: int, data: bytes) -> Value:
    """The value of one column, by its serial type."""
    if kind in INTEGERS:
        return int.from_bytes(data, "big", signed=True)
    if kind in (0, 10, 11):
        return None
    if kind == 7:
        value: float = struct.unpack(">d", data)[0]
        return value
    if kind in (8, 9):
        return kind - 8
    return data.decode() if kind % 2 else data
