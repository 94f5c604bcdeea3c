"""What is stored on disk: the tree of segments and the sessions it belongs to, within a budget."""

from __future__ import annotations

import hashlib
import os
import re
import time
from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from cache import files
from cache.chain import Head, Owner, Segment
from cache.eviction import victim
from cache.files import Doubt
from cache.prefix import PrefixIndex
from cache.segment import Header, check, read_header, timeline_hash
from cache.transfer import lengths_of

FILE = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.kv")
_LOCK_SECONDS = 10.0  # for a process that is just ending
FOLDER = re.compile(r"[0-9a-f]{32}")

Place = tuple[str, str]  # folder and name of a file


class _Stranger(NamedTuple):
    """What another model has left here."""

    used: float
    folder: Path
    nbytes: int


def folder_of(owner: Owner) -> str:
    """The folder of an owner: a hash, so that no name reaches a path."""
    kind = "named" if owner.named else "anonymous"
    return hashlib.blake2b("\0".join((owner.tenant, kind, owner.session)).encode(), digest_size=16).hexdigest()


def file_name(sequence: int, id: str) -> str:
    """Names sort by age within a folder."""
    return f"{sequence:016x}-{id}.kv"


class DiskTier:
    """The segments of one model (one ``fingerprint``) under ``root / fingerprint / <owner> / <sequence>-<id>.kv``.

    Belongs to one thread and does no I/O but the scan: what nobody needs any more is collected in ``doomed`` for a
    thread that unlinks it. Eviction takes what other models left, then the head that was used longest ago, first one
    of a tenant that holds more than its ``share`` of the budget, pinned ones last.

    Invariants: the ancestors of a living local segment are living and local; ``used`` is the sum of the bytes of all
    segments, planned ones included; every head is in the prefix index.
    """

    def __init__(self, root: Path, fingerprint: str, budget: int, floor: int = 0, share: float = 1.0) -> None:
        """``budget``: bytes of all files; ``floor``: bytes of the file system that stay free."""
        self.folder = root / fingerprint
        self.budget = budget
        self.used = 0
        self.damaged = 0  # files that failed their checks
        self.heads: OrderedDict[Owner, Head] = OrderedDict()  # least recently used first
        self.doomed: list[Path] = []
        self._lock = -1
        self._floor = floor
        self._share = share
        self.fingerprint = fingerprint
        self._strangers: list[_Stranger] = []  # least recently used last
        self._planned: dict[Segment, None] = {}  # begun, not complete
        self._known: dict[Place, Segment] = {}  # living and local
        self._held: Counter[str] = Counter()  # bytes by tenant
        self._index: defaultdict[tuple[str, bool], PrefixIndex[Head]] = defaultdict(PrefixIndex)

    def close(self) -> None:
        """Let another process have the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # -- finding ----------------------------------------------------------------------------------------------------

    def match(self, tenant: str, prompt: array[int], long: bool) -> tuple[Head | None, int]:
        """The stored session of ``tenant`` with the longest prefix of ``prompt``, and that prefix in tokens."""
        return self._index[tenant, long].match(prompt)

    def head(self, owner: Owner) -> Head | None:
        """What is stored of a session."""
        return self.heads.get(owner)

    def touch(self, head: Head) -> None:
        """A turn uses this session."""
        head.used = time.time()
        self.heads.move_to_end(head.owner)

    # -- writing ----------------------------------------------------------------------------------------------------

    def begin(self, segment: Segment) -> bool:
        """Make room for a segment that is to be written, ``nbytes`` by estimate, and keep its parent; False where there
        is none.
        """
        if segment.parent is not None:
            segment.parent.refs += 1
        if not self._make_room(segment.nbytes):
            if segment.parent is not None:
                self.let_go(segment.parent)
            return False
        self._count(segment, segment.nbytes)
        self._planned[segment] = None
        return True

    def complete(self, segment: Segment, nbytes: int) -> None:
        """The file is there: it is the newest of its owner from now on, unless it was forgotten meanwhile."""
        del self._planned[segment]
        self._count(segment, nbytes - segment.nbytes)
        segment.nbytes = nbytes
        segment.local = True
        self._known[segment.folder, segment.name] = segment
        if segment.lost:
            self._bury(segment)
        else:
            self._lead(segment.owner, segment, time.time())

    def abandon(self, segment: Segment) -> None:
        """The file could not be written."""
        del self._planned[segment]
        self._bury(segment)

    def forget(self, owner: Owner) -> None:
        """Drop what is stored of a session; what others go on from stays theirs."""
        for segment in self._planned:
            segment.dead |= segment.owner == owner
        head = self.heads.get(owner)
        if head is not None:
            self._drop(head)

    def condemn(self, segment: Segment) -> None:
        """A file failed its checks: every session that builds on it is cut back to what comes before it."""
        if segment.dead:
            return
        self.damaged += 1
        for head in [head for head in self.heads.values() if segment in head.tip.chain()]:
            if segment.parent is not None:
                self._lead(head.owner, segment.parent, head.used)
            else:
                self._drop(head)
        if not segment.dead:  # somebody still refers to it
            self._bury(segment)

    def hold(self, segment: Segment) -> None:
        """Keep a chain on disk while it is read."""
        segment.refs += 1

    def let_go(self, segment: Segment) -> None:
        """The reverse of ``hold``."""
        segment.refs -= 1
        self._collect(segment)

    def bytes_of(self, owner: Owner) -> int:
        """Bytes of all files that a session's timeline lies in, also those that it shares."""
        head = self.heads.get(owner)
        return 0 if head is None else sum(segment.nbytes for segment in head.tip.chain())

    # -- starting ---------------------------------------------------------------------------------------------------

    def scan(self) -> None:
        """Find again what an earlier process has written; temporary, damaged and superseded files are removed. Raises
        OSError, BlockingIOError where another process has the folder.
        """
        files.make_folder(self.folder)
        self._lock = files.lock(self.folder.parent, _LOCK_SECONDS)
        for entry in os.scandir(self.folder.parent):
            if FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False) and entry.name != self.fingerprint:
                size = sum(file.stat(follow_symlinks=False).st_size for file in Path(entry.path).rglob("*.kv"))
                self._strangers.append(_Stranger(entry.stat(follow_symlinks=False).st_mtime, Path(entry.path), size))
        self._strangers.sort(reverse=True)
        entries = [entry for entry in os.scandir(self.folder) if FOLDER.fullmatch(entry.name)]
        owners = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        for owner in owners:
            files.clear_temporaries(self.folder / owner)
        self.adopt(owners)

    def adopt(self, folders: Iterable[str]) -> None:
        """Take the files of these owners' folders into the tree, as far as they are not in it yet."""
        fresh: dict[Place, Header] = {}
        for folder in folders:
            for entry in os.scandir(self.folder / folder):
                if FILE.fullmatch(entry.name) and (folder, entry.name) not in self._known:
                    self._read(folder, entry.name, fresh)
        grown = [segment for place in fresh for segment in self._grow(place, fresh)]
        for segment in sorted(grown, key=lambda segment: segment.sequence):
            head = self.heads.get(segment.owner)
            if head is None or head.tip.sequence < segment.sequence:
                self._lead(segment.owner, segment, fresh[segment.folder, segment.name].created)
        for segment in grown:
            self._collect(segment)
        self.heads = OrderedDict(sorted(self.heads.items(), key=lambda item: item[1].used))
        self._make_room(0)

    def _read(self, folder: str, name: str, fresh: dict[Place, Header]) -> None:
        """One file's header, if it can be trusted and lies where it was written."""
        try:
            header = read_header(self.folder / folder, name)
            check(header, fingerprint=self.fingerprint)
            owner = Owner(header.tenant, header.session, header.named)
            if folder_of(owner) != folder or file_name(header.sequence, header.id) != name:
                raise Doubt("another place")
        except Doubt:
            self._reject((folder, name))
        except OSError:
            return  # says nothing about the file: it is tried again at the next start
        else:
            fresh[folder, name] = header

    def _grow(self, place: Place, fresh: dict[Place, Header]) -> list[Segment]:
        """The segment of a file and those before it that were not known yet; a broken chain ends before the break."""
        line = [place]
        while line[-1] in fresh and line[-1] not in self._known and len(line) <= len(fresh):
            parent = fresh[line[-1]].parent
            if parent is None:
                break
            folder, _, name = parent.partition("/")
            line.append((folder, name))
        grown = []
        for at in reversed(line):
            if at not in fresh or at in self._known:
                continue
            header = fresh[at]
            folder, _, name = (header.parent or "").partition("/")
            before = self._known.get((folder, name))
            if not continues(header, before):
                self._reject(at)
                continue
            segment = self._known[at] = continued(header, at, before, os.stat(self.folder / at[0] / at[1]).st_size)
            if before is not None:
                before.refs += 1
            self._count(segment, segment.nbytes)
            grown.append(segment)
        return grown

    def _reject(self, place: Place) -> None:
        """A file that cannot be trusted goes; counted once."""
        path = self.folder / place[0] / place[1]
        if path not in self.doomed:
            self.damaged += 1
            self.doomed.append(path)

    # -- making room ------------------------------------------------------------------------------------------------

    def _make_room(self, nbytes: int) -> bool:
        """Evict until ``nbytes`` more fit the budget and leave the floor free; False where they cannot."""
        system = os.statvfs(self.folder)
        total = self.used + sum(stranger.nbytes for stranger in self._strangers)
        lacking = max(total + nbytes - self.budget, nbytes + self._floor - system.f_bavail * system.f_frsize)
        while lacking > 0 and self._strangers:
            stranger = self._strangers.pop()
            self.doomed.append(stranger.folder)
            lacking -= stranger.nbytes
        aim = self.used - lacking
        if aim < 0:
            return False
        while self.used > aim and (head := self._victim()) is not None:
            self._drop(head)
        return self.used <= aim

    def _victim(self) -> Head | None:
        return victim(self.heads.values(), {t for t, held in self._held.items() if held > self._share * self.budget})

    # -- the tree ---------------------------------------------------------------------------------------------------

    def _lead(self, owner: Owner, segment: Segment, used: float) -> None:
        """Make ``segment`` the newest of ``owner``."""
        segment.refs += 1
        head = self.heads.get(owner)
        if head is None:
            head = self.heads[owner] = Head(owner, segment, used)
        else:
            self._index[owner.tenant, head.tip.long].remove(head)
            old, head.tip, head.used = head.tip, segment, used
            self.let_go(old)
        self.heads.move_to_end(owner)
        ids, mask = segment.timeline()
        hidden = mask.find(0)
        head.shareable = array("i") if segment.private else ids if hidden < 0 else ids[:hidden]
        self._index[owner.tenant, segment.long].put(head)

    def _drop(self, head: Head) -> None:
        del self.heads[head.owner]
        self._index[head.owner.tenant, head.tip.long].remove(head)
        self.let_go(head.tip)

    def _collect(self, segment: Segment) -> None:
        """Remove a segment that nobody refers to, and then maybe those before it."""
        here: Segment | None = segment
        while here is not None and here.refs == 0 and here.local:
            self._bury(here, collect=False)
            here = here.parent

    def _bury(self, segment: Segment, collect: bool = True) -> None:
        segment.dead = True
        self._count(segment, -segment.nbytes)
        if segment.local:
            segment.local = False
            del self._known[segment.folder, segment.name]
            self.doomed.append(self.folder / segment.folder / segment.name)
        if segment.parent is not None:
            segment.parent.refs -= 1
            if collect:
                self._collect(segment.parent)

    def _count(self, segment: Segment, nbytes: int) -> None:
        self.used += nbytes
        self._held[segment.owner.tenant] += nbytes


def continues(header: Header, before: Segment | None) -> bool:
    """Whether what comes before a file is there and is what it was written after."""
    ids, mask = b"", b""
    if before is None:
        if header.parent is not None or header.first:
            return False
    elif header.first > before.stop or before.owner.tenant != header.tenant or before.long is not header.long:
        return False
    else:
        kept, flags = before.timeline(header.first)
        ids, mask = kept.tobytes(), bytes(flags)
    after = timeline_hash(ids + header.tokens, mask + header.mask)
    return timeline_hash(ids, mask) == header.before and after == header.after


def continued(header: Header, place: Place, parent: Segment | None, nbytes: int) -> Segment:
    """The segment of a file that is there."""
    return Segment(
        owner=Owner(header.tenant, header.session, header.named),
        folder=place[0],
        name=place[1],
        sequence=header.sequence,
        parent=parent,
        first=header.first,
        tokens=array("i", header.tokens),
        mask=header.mask,
        after=header.after,
        states=lengths_of((*(entry.name for entry in header.tensors), *header.facts)),
        long=header.long,
        private=header.private,
        nbytes=nbytes,
        local=True,
    )
