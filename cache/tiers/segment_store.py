"""``SegmentStore``: the interface of a tier below the disk, which keeps copies of segment files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from cache.tier import Tier


class SegmentStore(Protocol):
    """A tier below the disk. ``tier`` is its name, ``budget`` the bytes that it may hold (None: no limit),
    ``evictions`` the sessions that had to leave it.

    A ``folder`` has the files of one session. Files are immutable: one that can be read is complete. Methods are called
    on one background thread, may take as long as the network does, and raise OSError; properties are read on any.
    """

    tier: Tier
    budget: int | None
    evictions: int

    @property
    def used(self) -> int:
        """Bytes that it holds, by its own last count."""

    @property
    def away(self) -> bool:
        """Whether the next call would fail untried, so that no turn waits for it."""

    def put(self, folder: str, name: str, path: Path) -> None:
        """Copy the file at ``path``. One that is there stays; FileExistsError where its size is another one."""

    def get(self, folder: str, name: str, path: Path) -> None:
        """Copy a file to ``path``, durable and complete or not at all. Raises FileNotFoundError where there is none."""

    def touch(self, folders: Iterable[str]) -> None:
        """These folders are in use: they are evicted last."""

    def names(self, folder: str) -> list[tuple[str, int]]:
        """Name and size in bytes of every file of a folder, by name; empty where there is no such folder."""

    def remove(self, folder: str, names: Iterable[str] | None) -> None:
        """Remove these files, or with None the whole folder. What is not there is no error."""

    def collect(self, keep: Callable[[str], bool]) -> int:
        """Evict whole folders, least recently used first, until the tier is within its budget; none for which ``keep``
        is true. The bytes removed.
        """
