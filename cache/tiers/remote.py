"""The remote tier: copies of segment files at any fsspec URL, for sessions that do not fit on the local disk.

A file is at ``<url>/<fingerprint>/<folder>/<name>``, with the folder and name of the disk tier. Files are immutable: a
file that exists is complete and never changes. Files of others under the URL are not trusted: other names and links are
ignored, and nothing outside of the tree is accessed.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fsspec.core import split_protocol, url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import get_filesystem_class

from cache.durable_files import sync_path
from cache.tier import Tier
from cache.tiers.circuit_breaker import REST, CircuitBreaker

PATIENCE = 10.0  # seconds for an answer; a turn may wait for it
SLOWEST = 2**20  # bytes per second at which a transfer is still waited for
STALE = 3600.0  # seconds after which a temporary file has no writer any more

FOLDER = re.compile(r"[0-9a-f-]{1,64}\Z")  # of fingerprints too
NAME = re.compile(r"[0-9a-f-]{1,96}\.kv\Z")
TEMPORARY = re.compile(r"\.[0-9a-f]{32}\.tmp\Z")

# Where a write is seen only when it is complete and moving is copying. Elsewhere files are moved to their names.
OBJECT_STORES = frozenset("s3 s3a gs gcs abfs abfss az adl oss oci obs cos r2 tos swift".split())
MODIFIED = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")  # as filesystems call it

T = TypeVar("T")


class _Entry(NamedTuple):
    """A plain file or a ``folder``. ``parent`` has no slashes at its ends; ``modified``: Unix seconds."""

    parent: str
    name: str
    folder: bool
    nbytes: int
    modified: float


class _Folder(NamedTuple):
    """All files of one session under one fingerprint; ``used``: Unix seconds."""

    fingerprint: str
    name: str
    nbytes: int
    used: float


class RemoteTier:
    """Segment files of one ``fingerprint`` under a URL. ``budget``: bytes under the whole URL; None: no limit.
    ``evictions``: folders that were evicted.

    Methods block on the network, so they are called on one background thread. They raise ``OSError`` with a message
    that contains no address; for a while after a failure they fail at once, see ``CircuitBreaker``. The constructor
    raises ValueError for a URL that no installed filesystem supports; it does not access the network.
    """

    tier = Tier.REMOTE

    def __init__(
        self, url: str, fingerprint: str, budget: int | None, patience: float = PATIENCE, rest: float = REST
    ) -> None:
        self._url = url
        self._fingerprint = _check_names(FOLDER, fingerprint)
        self.budget = budget
        self.evictions = 0
        self._patience = patience
        self._breaker = CircuitBreaker(rest)
        self._fs: Any = None
        self._root, self._object_store = _place(url)
        self._touched: dict[str, float] = {}  # by folder, Unix seconds: object stores do not tell when a file was read
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes of files under the URL: as counted by the last ``collect``, plus what this object has changed since."""
        return self._used

    @property
    def away(self) -> bool:
        """Whether the next call would fail without being tried."""
        return self._breaker.away

    def put(self, folder: str, name: str, path: Path) -> None:
        """Upload the file at ``path``, so that readers see it complete or not at all. An existing file is not replaced.
        Raises FileExistsError if that has another size, OSError.
        """
        place, size = self._at(folder), path.stat().st_size
        target = f"{place}/{_check_names(NAME, name)}"
        new = self._run(lambda fs: self._put(fs, place, target, path, size), size)
        self._used += size if new else 0
        self._touched[folder] = time.time()

    def get(self, folder: str, name: str, path: Path) -> None:
        """Download a file to ``path``, durably, complete or not at all. Raises FileNotFoundError if it does not exist,
        OSError if its size is wrong.
        """
        source = f"{self._at(folder)}/{_check_names(NAME, name)}"
        size = self._run(lambda fs: self._size(fs, source))
        if size < 0:
            raise FileNotFoundError("the remote tier has no such file")
        temporary = path.with_name(f".{secrets.token_hex(16)}.tmp")
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        try:
            self._run(lambda fs: fs.get_file(source, str(temporary)), size)
            if temporary.stat().st_size != size:
                raise OSError("the remote tier sent a file of another size")
            sync_path(temporary)
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync_path(path.parent)
        self._touched[folder] = time.time()

    def touch(self, folders: Iterable[str]) -> None:
        """Mark these folders as used now: files in other folders depend on theirs."""
        self._touched.update(dict.fromkeys(folders, time.time()))

    def names(self, folder: str) -> list[tuple[str, int]]:
        """Name and size in bytes of every file of a folder, sorted by name; empty if the folder does not exist."""
        found = self._list(self._at(folder))
        return sorted((file.name, file.nbytes) for file in found if not file.folder and NAME.match(file.name))

    def remove(self, folder: str, names: Iterable[str] | None) -> None:
        """Remove these files, or the whole folder if ``names`` is None. Missing files are no error."""
        wanted = None if names is None else {_check_names(NAME, name) for name in names}
        self._used -= self._clear(self._fingerprint, folder, wanted)
        if wanted is None:
            self._touched.pop(folder, None)

    def collect(self, keep: Callable[[str], bool]) -> int:
        """Count the bytes under the URL and remove whole folders, least recently used first, until they fit the budget.
        Returns the bytes removed. Folders of this fingerprint are kept if ``keep`` returns True; folders of other
        models are removed by age alone. Also removes old temporary files.
        """
        folders = sorted(self._folders(), key=lambda folder: folder.used)
        self._used = sum(folder.nbytes for folder in folders)
        before = self._used
        for folder in folders:
            if self.budget is None or self._used <= self.budget:
                break
            if folder.fingerprint != self._fingerprint or not keep(folder.name):
                self._used -= self._clear(folder.fingerprint, folder.name, None)
                self.evictions += 1
        return before - self._used

    # -- on the breaker's thread ------------------------------------------------------------------------------------

    def _run(self, work: Callable[[Any], T], nbytes: int = 0) -> T:
        """Run ``work`` on the filesystem, with a time limit that allows for the transfer of ``nbytes``."""
        return self._breaker.run(lambda: work(self._filesystem()), self._patience + nbytes / SLOWEST)

    def _filesystem(self) -> Any:
        """The filesystem object, created on first use, since some connect on creation."""
        if self._fs is None:
            self._fs = url_to_fs(self._url)[0]
        return self._fs

    def _put(self, fs: Any, place: str, target: str, path: Path, size: int) -> bool:
        """Upload a file; returns whether it is new."""
        with suppress(FileNotFoundError):
            if self._size(fs, target) != size:
                raise FileExistsError
            return False
        if self._object_store:
            fs.put_file(str(path), target)
            return True
        self._make(fs, place)
        temporary = f"{place}/.{secrets.token_hex(16)}.tmp"
        try:
            fs.put_file(str(path), temporary)
            fs.mv(temporary, target)
        except BaseException:
            with suppress(Exception):
                fs.rm_file(temporary)
            raise
        return True

    def _make(self, fs: Any, place: str) -> None:
        """Make a folder, in a local filesystem for this user only."""
        self._refuse_links(fs, place)
        fs.makedirs(place, exist_ok=True)
        if isinstance(fs, LocalFileSystem):
            fs.chmod(place, 0o700)

    def _size(self, fs: Any, path: str) -> int:
        """The size of a plain file, -1 of anything else. Raises FileNotFoundError."""
        self._refuse_links(fs, path)
        fs.invalidate_cache()
        return next((entry.nbytes for entry in _entries([fs.info(path)]) if not entry.folder), -1)

    def _refuse_links(self, fs: Any, place: str) -> None:
        """Raises FileNotFoundError where a link on the way from the URL to ``place`` would lead elsewhere."""
        while isinstance(fs, LocalFileSystem) and place != self._root:
            if fs.islink(place):
                raise FileNotFoundError
            place = place.rpartition("/")[0]

    def _list_folder(self, fs: Any, place: str) -> list[_Entry]:
        """What is in ``place``; nothing where there is no such place."""
        fs.invalidate_cache()
        try:
            self._refuse_links(fs, place)
            return list(_entries(fs.ls(place, detail=True)))
        except FileNotFoundError:
            return []

    def _list_tree(self, fs: Any, place: str) -> list[_Entry]:
        """All files below ``place``, found with few requests (for object stores)."""
        fs.invalidate_cache()
        try:
            return list(_entries(fs.find(place, detail=True).values()))
        except FileNotFoundError:
            return []

    # -- looking and removing ---------------------------------------------------------------------------------------

    def _at(self, folder: str, fingerprint: str | None = None) -> str:
        return f"{self._root}/{fingerprint or self._fingerprint}/{_check_names(FOLDER, folder)}"

    def _list(self, place: str) -> list[_Entry]:
        """What is directly in ``place``."""
        found = self._run(lambda fs: self._list_folder(fs, place))
        return [entry for entry in found if entry.parent == place.strip("/")]

    def _clear(self, fingerprint: str, folder: str, names: set[str] | None) -> int:
        """Remove files of a folder, and the folder itself if ``names`` is None. Returns the bytes removed."""
        place = self._at(folder, fingerprint)
        freed = 0
        for file in self._list(place):
            if not file.folder and NAME.match(file.name) and (names is None or file.name in names):
                self._drop(f"{place}/{file.name}")
                freed += file.nbytes
        if names is None and not self._object_store:
            self._run(lambda fs: _rmdir(fs, place))
        return freed

    def _drop(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._run(lambda fs: fs.rm_file(path))

    def _folders(self) -> list[_Folder]:
        """Every session's folder under the URL."""
        found: defaultdict[tuple[str, str], list[_Entry]] = defaultdict(list)
        for fingerprint in self._list(self._root):
            if not fingerprint.folder or not FOLDER.match(fingerprint.name):
                continue
            place = f"{self._root}/{fingerprint.name}"
            for file in self._files(place):
                parent, _, folder = file.parent.rpartition("/")
                if not file.folder and parent == place.strip("/") and FOLDER.match(folder):
                    found[fingerprint.name, folder].append(file)
        return [self._folder(fingerprint, name, files) for (fingerprint, name), files in found.items()]

    def _files(self, place: str) -> Iterator[_Entry]:
        """Everything two levels below ``place``."""
        if self._object_store:
            yield from self._breaker.run(lambda: self._list_tree(self._filesystem(), place), 100 * self._patience)
            return
        for folder in self._list(place):
            if folder.folder and FOLDER.match(folder.name):
                yield from self._list(f"{place}/{folder.name}")

    def _folder(self, fingerprint: str, name: str, files: list[_Entry]) -> _Folder:
        for file in files:
            if TEMPORARY.match(file.name) and time.time() - file.modified > STALE:
                self._drop(f"{self._at(name, fingerprint)}/{file.name}")
        ours = [file for file in files if NAME.match(file.name)]
        touched = self._touched.get(name, 0.0) if fingerprint == self._fingerprint else 0.0
        used = max([touched, *(file.modified for file in ours)])
        return _Folder(fingerprint, name, sum(file.nbytes for file in ours), used)


def _place(url: str) -> tuple[str, bool]:
    """The path of a URL within its filesystem, and whether that is an object store. Raises ValueError."""
    protocol = split_protocol(url)[0] or "file"
    if "::" in url:
        raise ValueError("chained URLs cannot be a remote tier")
    try:
        root = get_filesystem_class(protocol)._strip_protocol(url).rstrip("/")
    except ImportError as error:
        raise ValueError(f"{protocol}:// needs a package that is not installed") from error
    except ValueError:
        raise ValueError("no filesystem is known for that kind of URL") from None
    if not root:
        raise ValueError("a URL with a folder or a bucket is needed")
    return root, protocol in OBJECT_STORES


def _check_names(pattern: re.Pattern[str], name: str) -> str:
    if not pattern.match(name):
        raise ValueError("not a name that this tier gives")
    return name


def _entries(infos: Iterable[dict[str, Any]]) -> Iterator[_Entry]:
    """The plain files and folders of a listing; links and entries of other types are left out."""
    for info in infos:
        parent, _, name = str(info.get("name", "")).strip("/").rpartition("/")
        size = info.get("size")
        if info.get("type") == "directory":
            yield _Entry(parent, name, True, 0, 0.0)
        elif info.get("type") == "file" and isinstance(size, int) and size >= 0:
            yield _Entry(parent, name, False, size, _read_modified(info))


def _read_modified(info: dict[str, Any]) -> float:
    """Unix seconds; 0 where the filesystem does not tell."""
    when = next((info[key] for key in MODIFIED if info.get(key) is not None), 0.0)
    if isinstance(when, str):
        with suppress(ValueError):
            when = datetime.fromisoformat(when)
    if isinstance(when, datetime):
        return when.timestamp()
    return float(when) if isinstance(when, (int, float)) else 0.0


def _rmdir(fs: Any, place: str) -> None:
    """Remove an empty folder; one that is not empty stays."""
    with suppress(OSError):
        fs.rmdir(place)
