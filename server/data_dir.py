"""The folder of everything that outlives the server, held by one server at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server.config import UsageError


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """The folder, made for this user only if it is new, and locked against other servers. Raises UsageError.

    The lock is the kernel's: it ends with the process, however that ends.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UsageError(f"--data-dir: {folder} cannot be used: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"--data-dir: {folder} is in use by another server") from None
        yield folder
    finally:
        os.close(lock)
