"""The data dir: created with safe permissions, and locked by one server at a time."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from server.config.usage_error import UsageError

FILES = ("lock", "server", "models", "log.sqlite", "log.sqlite-wal", "log.sqlite-shm", "log.sqlite-starts")
FOLDERS = ("kv", "transfer", "verdicts")


class InUse(UsageError):
    """Another server uses the data dir."""


IDENTITY = re.compile(r"[0-9a-f]{32}\Z")


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """The data dir, created for this user only if it is new, and locked against other servers. Raises UsageError.

    The lock is a file lock: the kernel releases it when the process ends. Existing files under our names are refused
    unless this user owns them: another user who can write to the folder must not choose what is overwritten.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check(folder)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UsageError(f"--data-dir: {folder} cannot be used: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InUse(f"--data-dir: {folder} is in use by another server") from None
        yield folder
    finally:
        os.close(lock)


def identity(folder: Path) -> str:
    """The id of the server whose cache is in this folder; generated at its first start. Raises UsageError."""
    path = folder / "server"
    try:
        name = path.read_text("ascii", "replace") if path.exists() else ""
        if not IDENTITY.match(name):
            name = secrets.token_hex(16)
            part = folder / f"server-{name}"
            with part.open("x") as file:
                file.write(name)
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)
    except OSError as error:
        raise UsageError(f"--data-dir: {folder} cannot be used: {error.strerror}") from None
    return name


def empty_cache(folder: Path) -> None:
    """Remove all KV. Raises UsageError."""
    try:
        shutil.rmtree(folder / "kv")
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"--data-dir: {folder / 'kv'} cannot be removed: {error.strerror}") from None


def _check(folder: Path) -> None:
    """Raises UsageError unless the folder belongs to this user or to root (as mounted volumes do), and everything in it
    under our names to this user, each a plain file or a folder as it should be and no link."""
    me = os.geteuid()
    if folder.stat().st_uid not in (me, 0):
        raise UsageError(f"--data-dir: {folder} belongs to another user")
    for names, is_right, kind in ((FILES, stat.S_ISREG, "plain file"), (FOLDERS, stat.S_ISDIR, "folder")):
        for name in names:
            try:
                found = (folder / name).lstat()
            except FileNotFoundError:
                continue
            if not is_right(found.st_mode):
                raise UsageError(f"--data-dir: {folder / name} is not a {kind}")
            if found.st_uid != me:
                raise UsageError(f"--data-dir: {folder / name} belongs to another user")
