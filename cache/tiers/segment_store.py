"""``SegmentStore``: the interface of a tier below the disk, which keeps copies of segment files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from cache.tier import Tier


class SegmentStore(Protocol):
    """A tier below the disk. ``tier`` is its name, ``budget`` its limit in bytes (None: no limit), ``evictions`` the
    number of sessions that were evicted.

    A ``folder`` contains the files of one session. Files are immutable: a file that can be read is complete. Methods
    are called on one background thread, may block on the network, and raise OSError; properties are read on any thread.
    """

    tier: Tier
    budget: int | None
    evictions: int

    @property
    def used(self) -> int:
        """Bytes that it holds, as last counted."""

    @property
    def away(self) -> bool:
        """Whether the next call would fail without being tried, so that no turn should wait for it."""

    def put(self, folder: str, name: str, path: Path) -> None:
        """Copy the file at ``path`` to the tier. An existing file is not replaced; FileExistsError if it has another
        size.
        """

    def get(self, folder: str, name: str, path: Path) -> None:
        """Copy a file to ``path``, durably, complete or not at all. Raises FileNotFoundError if it does not exist."""

    def touch(self, folders: Iterable[str]) -> None:
        """Mark these folders as used now: they are evicted last."""

    def names(self, folder: str) -> list[tuple[str, int]]:
        """Name and size in bytes of every file of a folder, sorted by name; empty if the folder does not exist."""

    def remove(self, folder: str, names: Iterable[str] | None) -> None:
        """Remove these files, or the whole folder if ``names`` is None. Missing files are no error."""

    def collect(self, keep: Callable[[str], bool]) -> int:
        """Evict whole folders, least recently used first, until the tier is within its budget, except those for which
        ``keep`` returns True. Returns the bytes removed.
        """
