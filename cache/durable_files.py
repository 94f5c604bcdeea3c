"""Files and names of files that outlive a loss of power."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file, readable for its owner only: after a crash it is the old one or the new one. Raises OSError, with
    nothing left beside it.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Make the content of a file durable, or the names in a folder. Raises OSError."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
