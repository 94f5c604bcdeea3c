"""`MappedFile`: the bytes of a file that is mapped into memory."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

from scheduler.weights.known_files import OpenedFile


class MappedFile:
    """``data`` is uint8, and read from the file when it is looked at; ``opened`` tells which file that is."""

    def __init__(self, path: Path) -> None:
        """Raises ``OSError``, ``ValueError`` for an empty file."""
        with path.open("rb") as file:
            self.opened = OpenedFile(path, os.fstat(file.fileno()))
            # private and writable, as torch wants memory to be; nothing is ever written
            self.memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.data = torch.frombuffer(self.memory, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return len(self.data)

    def drop_pages(self) -> None:
        """Give the memory of the mapping back; it is read from the file again when it is needed."""
        self.memory.madvise(mmap.MADV_DONTNEED)
