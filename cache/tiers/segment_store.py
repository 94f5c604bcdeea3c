"""What a tier below the disk does: it keeps copies of segment files, by folder and name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from cache.tier import Tier


class SegmentStore(Protocol):
    """A tier below the disk; ``RemoteTier`` says what each method does.

    ``tier`` is its name, ``budget`` the bytes that it may hold (None: no limit). Methods are called on one background
    thread, properties on any. Files are immutable; one that can be read is complete. Methods raise OSError.
    """

    tier: Tier
    budget: int | None
    evictions: int

    @property
    def used(self) -> int: ...

    @property
    def away(self) -> bool: ...

    def put(self, folder: str, name: str, path: Path) -> None: ...

    def get(self, folder: str, name: str, path: Path) -> None: ...

    def touch(self, folders: Iterable[str]) -> None: ...

    def names(self, folder: str) -> list[tuple[str, int]]: ...

    def remove(self, folder: str, names: Iterable[str] | None) -> None: ...

    def collect(self, keep: Callable[[str], bool]) -> int: ...
