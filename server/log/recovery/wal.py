"""Reads SQLite's write-ahead log before SQLite does, as SQLite would drop all frames after a damaged one."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

WAL_MAGIC = b"\x37\x7f\x06"
HEADER, FRAME = 32, 24  # bytes
PAGE_SIZE = 4096  # of SQLite's own choice, where the log does not tell
WORD = 2**32 - 1
INDEX_HEADER = 48  # bytes of one of the two headers of a wal-index


class Wal:
    """The content of a write-ahead log. ``frames``: the offset of each page's last intact version, up to the last
    commit. ``sound``: nothing that was committed is missing. Frames after the last commit are not damage: their
    transaction was unfinished or rolled back.
    """

    def __init__(self, path: Path, index: Path) -> None:
        """Read the log and its index; a file that does not exist or cannot be read counts as empty."""
        self.frames: dict[int, int] = {}
        self.page_size = 0
        data = content(path)
        if not data:
            known = committed_state(content(index), None)
            self.sound = known is None or known.copied >= known.frames
            return
        whole = len(data) >= HEADER and data[:3] == WAL_MAGIC
        order = ">" if whole and data[3] & 1 else "<"
        whole = whole and checksum(order, data[:24]) == struct.unpack_from(">II", data, 24)
        self.page_size = int.from_bytes(data[8:12], "big") if whole else PAGE_SIZE
        salts = data[16:24] if whole else data[HEADER + 8 : HEADER + 16]
        known = committed_state(content(index), salts)
        self.sound = self._read(data, order, salts, None if known is None else known.frames) and whole

    def _read(self, data: bytes, order: str, salts: bytes, expected: int | None) -> bool:
        """Check every frame against the checksum of the one before, so that frames after a damaged one are found too.
        ``expected``: how many are committed, if the index knows. Returns whether none of these is missing."""
        size = self.page_size
        good: list[tuple[int, int, int]] = []  # number of the frame, its page, its offset
        whole = commits = 0  # the first so many frames are good; the number of the last good frame that commits
        for number, at in enumerate(range(HEADER, len(data) - FRAME - size + 1, FRAME + size), 1):
            page, pages, _, _, *sums = struct.unpack_from(">6I", data, at)
            before = struct.unpack_from(">II", data, at - size - 8 if number > 1 else 24)
            covered = data[at : at + 8] + data[at + FRAME : at + FRAME + size]
            if data[at + 8 : at + 16] != salts or not page or checksum(order, covered, *before) != (*sums,):
                continue
            good.append((number, page, at + FRAME))
            whole += whole == number - 1
            if pages and (expected is None or whole == number):
                commits = number
        commits = max(commits, expected or 0)
        self.frames = {page: offset for number, page, offset in good if number <= commits}
        return whole >= commits


class Committed(NamedTuple):
    """From the index of a write-ahead log: how many frames are committed, and how many of these are in the database."""

    frames: int
    copied: int


def committed_state(index: bytes, salts: bytes | None) -> Committed | None:
    """What the index says about the log with these salts; None if nothing, or if it is damaged."""
    first = index[:INDEX_HEADER]
    if len(index) < 2 * INDEX_HEADER + 4 or first != index[INDEX_HEADER : 2 * INDEX_HEADER] or not first[12]:
        return None
    if checksum("=", first[:40]) != struct.unpack_from("=II", first, 40):
        return None
    if salts is not None and first[32:40] != salts:
        return None
    return Committed(*struct.unpack_from("=I", first, 16), *struct.unpack_from("=I", index, 2 * INDEX_HEADER))


def checksum(order: str, data: bytes, first: int = 0, second: int = 0) -> tuple[int, int]:
    """SQLite's checksum over words in a byte order."""
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for one, two in zip(words[::2], words[1::2], strict=True):
        first = (first + one + second) & WORD
        second = (second + two + first) & WORD
    return first, second


def content(path: Path) -> bytes:
    """The content of a regular file; empty if it cannot be read."""
    try:
        return path.read_bytes() if path.is_file() and not path.is_symlink() else b""
    except OSError:
        return b""
