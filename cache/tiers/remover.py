"""``Remover``: unlinks obsolete files on a background thread, and retries those that could not be unlinked."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cache import whole_files
from cache.segments.chain import Owner
from cache.tiers.disk import DiskTier
from cache.tiers.io_threads import WorkQueue
from cache.tiers.segment_folder import folder_of

_PAUSE = 5.0  # seconds until what could not be unlinked is tried again


class _Removed(NamedTuple):
    """Files that could not be unlinked, and the free bytes of the file system."""

    left: list[Path]
    free: int | None


class Remover:
    """Unlinks the disk tier's ``obsolete`` files on the thread of ``queue``."""

    def __init__(self, disk: DiskTier, queue: WorkQueue) -> None:
        self.errors = 0
        self.left: dict[Path, int] = {}  # could not be unlinked
        self._disk = disk
        self._queue = queue
        self._paused_until = 0.0

    def begin(self) -> None:
        """Begin to unlink obsolete files, unless that has just failed."""
        if (self.left or self._disk.space.obsolete) and time.monotonic() >= self._paused_until:
            self.remove()

    def remove(self, owner: Owner | None = None, callback: Callable[[], None] | None = None) -> None:
        """Begin to unlink obsolete files; ``callback`` is called afterwards if no file of ``owner`` is left."""
        obsolete, self._disk.space.obsolete = self.left | self._disk.space.obsolete, {}
        self.left = {}

        def finish(outcome: _Removed | Exception) -> None:
            if isinstance(outcome, Exception):
                outcome = _Removed(list(obsolete), None)
            left = {path: obsolete[path] for path in outcome.left}
            self._disk.space.set_free(outcome.free, sum(obsolete.values()) - sum(left.values()))
            if left:
                self.left |= left
                self.errors += 1
                self._paused_until = time.monotonic() + _PAUSE
            if callback is not None and (
                owner is None or folder_of(owner) not in {path.parent.name for path in self.left}
            ):
                callback()

        self._queue.submit(lambda: _Removed(remove_all(list(obsolete)), self._disk.segment_folder.measure()), finish)


def remove_all(obsolete: list[Path]) -> list[Path]:
    """Unlink files, and their folders if these are then empty; remove folders of other models. Returns the files that
    are left.
    """
    left: list[Path] = []
    for path in obsolete:
        if path.suffix != ".kv":
            shutil.rmtree(path, ignore_errors=True)
            continue
        try:
            whole_files.remove(path.parent, [path.name])
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            continue  # no file of ours is there
        except OSError:
            left.append(path)
            continue
        with suppress(OSError):
            path.parent.rmdir()
    return left
