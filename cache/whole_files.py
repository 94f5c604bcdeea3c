"""Files that are written completely or not at all, and checks against files that another user may have put in their
place.

A file is written under a temporary name, synced, and renamed. It is opened without following links, and refused unless
it is a regular file of this user. Folders are opened without following links too, and files are accessed relative to
the folder's descriptor; links above a folder must be resolved by the caller.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

NAME = "[A-Za-z0-9_][A-Za-z0-9._-]{0,199}"  # what a file may be called; a temporary one begins with a dot
_PLAIN = re.compile(NAME)

# What is wrong with the file itself when it cannot be opened; anything else is the machine's trouble.
_REASONS = {
    errno.ENOENT: "missing",
    errno.ELOOP: "not a regular file",
    errno.ENOTDIR: "not in a folder",
    errno.ENXIO: "not a regular file",
    errno.ENODEV: "not a regular file",
    errno.EACCES: "not readable",
    errno.EPERM: "not readable",
}


class CorruptFile(Exception):
    """A file that cannot be trusted. ``reason`` is a few words without a path or content of the file.

    An OSError, in contrast, says nothing about the file: the same read may succeed later.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def write_file(folder: Path, name: str, chunks: Iterable[bytes | memoryview]) -> int:
    """Write the file ``name`` from ``chunks`` of bytes; it is on stable storage when this returns. Returns its size in
    bytes.

    If anything fails no file is left, not even an older one of that name if the rename was done already. Raises
    OSError, ValueError for a bad name.
    """
    _check_name(name)
    with _open(folder) as fd:
        temporary = f".{secrets.token_hex(8)}.tmp"
        left = temporary  # what is to be removed if anything fails
        try:
            size = _write(os.open(temporary, _NEW, 0o600, dir_fd=fd), chunks)
            os.rename(temporary, name, src_dir_fd=fd, dst_dir_fd=fd)
            left = name
            os.fsync(fd)
        except BaseException:
            with suppress(OSError):
                os.unlink(left, dir_fd=fd)
            raise
    return size


def make_folder(path: Path) -> None:
    """Create ``path`` and missing parents, for this user only, and sync each entry. Raises OSError, also for a link."""
    try:
        os.close(os.open(path, _FOLDER))
    except FileNotFoundError:
        make_folder(path.parent)
        with _open(path.parent) as fd:
            with suppress(FileExistsError):
                os.mkdir(path.name, 0o700, dir_fd=fd)
            os.fsync(fd)


def make_private(folder: Path) -> Path:
    """The folder, made if it is not there. Raises OSError, also if other users can write to or read it."""
    make_folder(folder)
    check_private(folder)
    return folder


def check_private(folder: Path) -> None:
    """Raises PermissionError if other users can write to or read ``folder``, OSError if it is not there."""
    facts = folder.lstat()
    if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        raise PermissionError(errno.EACCES, "the cache folder is open to other users")


def open_file(folder: Path, name: str) -> int:
    """A file descriptor for reading ``name``; the caller closes it. Does not block. Raises CorruptFile if the file is
    missing, not a regular file or another user's, OSError otherwise.
    """
    if not _PLAIN.fullmatch(name):
        raise CorruptFile("not a file's name")
    try:
        with _open(folder) as above:
            fd = os.open(name, _OLD, dir_fd=above)
    except OSError as error:
        if error.errno in _REASONS:
            raise CorruptFile(_REASONS[error.errno]) from None
        raise
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise CorruptFile("not a regular file")
        if facts.st_uid != os.geteuid():
            raise CorruptFile("another user's file")
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_at(fd: int, size: int, offset: int) -> bytearray:
    """Exactly ``size`` bytes at ``offset``. Raises CorruptFile if the file is shorter. The caller has checked that
    ``size`` is plausible.
    """
    data = bytearray(size)
    read_into(fd, memoryview(data), offset)
    return data


def read_into(fd: int, buffer: memoryview, offset: int) -> None:
    """Fill ``buffer`` (bytes, contiguous) from ``offset``. Raises CorruptFile if the file is shorter."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            raise CorruptFile("shorter than it was")
        done += count


def lock(folder: Path, seconds: float) -> int:
    """Lock ``folder`` against other processes until the returned descriptor is closed or this process ends. Waits up to
    ``seconds`` for a process that is ending; then raises BlockingIOError.
    """
    with _open(folder) as fd:
        held = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=fd)
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(held)
                raise
            time.sleep(0.05)
        else:
            return held


def is_locked(folder: Path) -> bool:
    """Whether a process has the lock of ``folder``; False for one that cannot be opened."""
    try:
        with _open(folder) as fd:
            held = os.open("lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    except OSError:
        return False
    try:
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(held)
    return False


def remove(folder: Path, names: Iterable[str]) -> None:
    """Unlink those files of ``names`` that exist, and sync the folder. Raises OSError, and ValueError for a name with a
    slash.
    """
    with _open(folder) as fd:
        for name in names:
            if "/" in name:
                raise ValueError("a file's name has no slash")
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
        os.fsync(fd)


def clear_temporaries(folder: Path) -> None:
    """Unlink temporary files of writers that were killed. Nobody may be writing to ``folder``. Raises OSError."""
    with _open(folder) as fd:
        for name in os.listdir(fd):
            if name.startswith(".") and name.endswith(".tmp"):
                os.unlink(name, dir_fd=fd)


@contextmanager
def _open(folder: Path) -> Iterator[int]:
    fd = os.open(folder, _FOLDER)
    try:
        yield fd
    finally:
        os.close(fd)


def _check_name(name: str) -> None:
    if not _PLAIN.fullmatch(name):
        raise ValueError("a file's name has letters, digits, '.', '_' and '-'")


def _write(fd: int, chunks: Iterable[bytes | memoryview]) -> int:
    """Write all of ``chunks`` to ``fd``, sync and close it. Returns the number of bytes."""
    size = 0
    try:
        for chunk in chunks:
            rest = memoryview(chunk)
            size += len(rest)
            while rest:
                rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    return size
