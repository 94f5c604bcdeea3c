"""``SegmentFolder``: the folder of segment files of one model: names of files, the lock against other processes, and
scanning at start.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

from cache import whole_files
from cache.segments.chain import LooseSegment, Owner, Place, read_segment
from cache.segments.segment_file import check, read_header
from cache.whole_files import CorruptFile

FILE = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.kv")
FOLDER = re.compile(r"[0-9a-f]{32}")
_LOCK_SECONDS = 10.0  # for a process that is just ending


class FolderContents(NamedTuple):
    """The headers of all files. ``damaged`` files cannot be trusted; ``unread`` files could not be read because of an
    error of the system.
    """

    fresh: dict[Place, LooseSegment]
    damaged: list[Place]
    unread: set[Place]


class ForeignSegments(NamedTuple):
    """A folder of another model's segments."""

    used: float
    folder: Path
    nbytes: int


def folder_of(owner: Owner) -> str:
    """The name of an owner's folder: a hash, so that no session name is part of a path."""
    kind = "named" if owner.named else "anonymous"
    return hashlib.blake2b("\0".join((owner.tenant, kind, owner.session)).encode(), digest_size=16).hexdigest()


def file_name(sequence: int, id: str) -> str:
    """The name of a segment file; within a folder, names sort by age."""
    return f"{sequence:016x}-{id}.kv"


class SegmentFolder:
    """Files at ``root / fingerprint / <owner> / <sequence>-<id>.kv``. Keeps no index of them, so any thread may call
    ``read_segment`` and ``measure``. One process at a time may use the folder of a fingerprint.
    """

    def __init__(self, root: Path, fingerprint: str) -> None:
        self.folder = root / fingerprint
        self._fingerprint = fingerprint
        self._lock = -1

    def open(self) -> list[ForeignSegments]:
        """Create the folder and lock it against other processes. Returns the folders of other models beside it that no
        process uses, least recently used last. Raises OSError, and BlockingIOError if another process has the lock.
        """
        whole_files.make_folder(self.folder)
        root = self.folder.parent
        self._lock = whole_files.lock(self.folder, _LOCK_SECONDS)
        other_models = []
        for entry in os.scandir(root):
            is_other = FOLDER.fullmatch(entry.name) and entry.name != self.folder.name
            if is_other and entry.is_dir(follow_symlinks=False) and not whole_files.is_locked(Path(entry.path)):
                stored = (file.stat(follow_symlinks=False) for file in Path(entry.path).rglob("*"))
                size = sum(stat.st_size for stat in stored if S_ISREG(stat.st_mode))
                other_models.append(ForeignSegments(entry.stat(follow_symlinks=False).st_mtime, Path(entry.path), size))
        return sorted(other_models, reverse=True)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def read(self) -> FolderContents:
        """Read the headers of all files and remove temporary files. Nobody may be writing. Raises OSError."""
        contents = FolderContents({}, [], set())
        entries = [entry for entry in os.scandir(self.folder) if FOLDER.fullmatch(entry.name)]
        for folder in [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]:
            whole_files.clear_temporaries(self.folder / folder)
            for file in os.scandir(self.folder / folder):
                place = (folder, file.name)
                if not FILE.fullmatch(file.name):
                    continue
                try:
                    contents.fresh[place] = self.read_segment(place)
                except CorruptFile:
                    contents.damaged.append(place)
                except OSError:
                    contents.unread.add(place)  # it is tried again at the next start
        return contents

    def read_segment(self, place: Place) -> LooseSegment:
        """Read the header of a file. Raises CorruptFile if it cannot be trusted or is not at the place for which it was
        written, or OSError.
        """
        header = read_header(self.folder / place[0], place[1])
        check(header, fingerprint=self._fingerprint)
        owner = Owner(header.tenant, header.session, header.named)
        if (folder_of(owner), file_name(header.sequence, header.id)) != place:
            raise CorruptFile("another place")
        return read_segment(header, place)

    def measure(self) -> int | None:
        """The free bytes of the file system, None if they cannot be read; may block on the disk."""
        try:
            system = os.statvfs(self.folder)
        except OSError:  # the next write reports it
            return None
        return system.f_bavail * system.f_frsize
