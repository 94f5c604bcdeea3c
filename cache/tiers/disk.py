"""``DiskTier``: the index of all segments on disk, with the sessions they belong to, their sizes and eviction within a
budget.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from pathlib import Path

from cache.pages.eviction import TenantShares, victim
from cache.pages.prefix import PrefixIndexes
from cache.segments.chain import ChainHead, LooseSegment, Owner, Place, Segment
from cache.tier import Tier, TierHolding, TierStats
from cache.tiers.disk_space import DiskSpace
from cache.tiers.segment_folder import ForeignSegments, SegmentFolder, folder_of
from cache.tiers.segment_index import SegmentIndex


class DiskTier:
    """The segments of one model (one ``fingerprint``), whose files are in a ``segment_folder``.

    Used by one thread, and does no I/O except the scan at start. Files that are no longer needed become obsolete in
    ``space``. Eviction removes files of other models first, then the head that was used longest ago: first those of
    tenants that hold more than their ``share`` of the budget, pinned ones last. What is being read, or is the parent of
    a file being written, stays.

    Invariants: see ``check_integrity``.
    """

    def __init__(
        self,
        root: Path,
        fingerprint: str,
        budget: int,
        floor: int = 0,
        share: float = 1.0,
        kept: Collection[str] = (),
    ) -> None:
        """``budget``: bytes of all files. ``floor``: bytes of the file system that must stay free. ``share``: of the
        budget, per tenant. ``kept``: fingerprints of models whose files are not evicted, as they have engines of their
        own.
        """
        self.segment_folder = SegmentFolder(root, fingerprint)
        self.folder = self.segment_folder.folder
        self.fingerprint = fingerprint
        self.space = DiskSpace(budget, floor)
        self.damaged = 0  # files that failed their checks
        self.evictions = 0  # sessions that had to make room
        self.heads: OrderedDict[Owner, ChainHead] = OrderedDict()  # least recently used first
        self._kept_models = frozenset(kept)
        self._shares = TenantShares(share, budget)  # bytes
        self._other_models: list[ForeignSegments] = []  # least recently used last
        self._damaged_folders: set[str] = set()  # folders that have lost files to damage, and got none since
        self._planned: dict[Segment, None] = {}  # begun, not complete
        self._holds: Counter[Segment] = Counter()  # the ends of chains that are being read
        self._known = SegmentIndex()  # living and local
        self._index: PrefixIndexes[ChainHead] = PrefixIndexes()

    # -- finding ----------------------------------------------------------------------------------------------------

    def match(self, tenant: str, prompt: array[int], long: bool) -> tuple[ChainHead | None, int]:
        """The stored session of ``tenant`` with the longest common prefix with ``prompt``, and that prefix's length in
        tokens.
        """
        return self._index.match(tenant, long, prompt)

    def head(self, owner: Owner) -> ChainHead | None:
        """The head of a session; None if nothing of it is stored."""
        return self.heads.get(owner)

    def has_damage(self, owner: Owner) -> bool:
        """Whether files of a session were damaged, with none written since."""
        return bool(self._damaged_folders) and folder_of(owner) in self._damaged_folders

    def segments_in(self, folders: Collection[str]) -> list[Segment]:
        return self._known.within(folders)

    def touch(self, head: ChainHead) -> None:
        head.used = time.time()
        self.heads.move_to_end(head.owner)

    # -- writing ----------------------------------------------------------------------------------------------------

    def begin(self, segment: Segment) -> bool:
        """Make room for a segment that will be written (``nbytes`` is an estimate) and add a reference to its parent.
        False, with nobody evicted, if there is no room.
        """
        if not self._make_room(segment.nbytes, segment.parent):
            return False
        if segment.parent is not None:
            segment.parent.refs += 1
        self._count(segment, segment.nbytes)
        self._planned[segment] = None
        return True

    def set_beside(self, nbytes: int) -> None:
        """Files that are no KV take so many bytes of the budget."""
        self.space.beside = nbytes
        self._make_room(0)

    def is_short_of(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more would leave less of the file system free than the floor."""
        return self.space.lacking_on_disk(nbytes + self._coming) > 0

    @property
    def _coming(self) -> int:
        """Bytes of files that are being written."""
        return sum(segment.nbytes for segment in self._planned)

    def complete(self, segment: Segment, nbytes: int) -> None:
        """The file of a segment is complete: it becomes the head of its owner, unless it was forgotten meanwhile."""
        del self._planned[segment]
        self._count(segment, nbytes - segment.nbytes)
        segment.nbytes = nbytes
        segment.local = True
        self._known.add(segment)
        self._damaged_folders.discard(segment.folder)
        if segment.lost:
            self._remove_segment(segment)
        else:
            self._set_head(segment.owner, segment, time.time())

    def abort(self, segment: Segment) -> None:
        del self._planned[segment]
        self._remove_segment(segment)

    def forget(self, owner: Owner) -> None:
        """Drop what is stored of a session, except segments that are ancestors of other sessions' segments."""
        for segment in self._planned:
            segment.dead |= segment.owner == owner
        self._damaged_folders.discard(folder_of(owner))
        head = self.heads.get(owner)
        if head is not None:
            self._drop(head)

    def orphans(self, owner: Owner) -> list[Segment]:
        """The segments of a forgotten session that are parents of other sessions' segments, each cut to the tokens that
        these share and held. The caller cuts the files and then calls ``complete_cut``.
        """
        if folder_of(owner) not in self._known.folders:
            return []
        needed: dict[Segment, int] = {}
        for segment in (*self._known, *self._planned):
            if segment.parent is not None and segment.parent.owner == owner and segment.parent.local:
                needed[segment.parent] = max(needed.get(segment.parent, 0), segment.first)
        found = [segment for segment, stop in needed.items() if not segment.orphan or stop < segment.stop]
        for segment in found:
            segment.cut(needed[segment])
            segment.orphan = True
            self.hold(segment)
        for head in [head for head in self.heads.values() if head.tip in needed]:
            self._index.put(owner.tenant, head.tip.long, head)
        return found

    def complete_cut(self, segment: Segment, nbytes: int | None) -> None:
        """An orphan's file has been cut to ``nbytes``; None: that failed, and the file is removed as damaged."""
        if nbytes is None:
            self.mark_damaged(segment)
        elif not segment.dead:
            self._count(segment, nbytes - segment.nbytes)
            segment.nbytes = nbytes
        self.release(segment)

    def mark_damaged(self, segment: Segment) -> None:
        """A file failed its checks: every session that depends on it is cut back to the tokens before it."""
        if segment.dead:
            return
        self.damaged += 1
        for head in [head for head in self.heads.values() if segment in head.tip.chain()]:
            self._damaged_folders.add(folder_of(head.owner))
            if segment.parent is not None:
                self._set_head(head.owner, segment.parent, head.used)
            else:
                self._drop(head)
        if not segment.dead:  # it still has references
            self._remove_segment(segment)

    def hold(self, segment: Segment) -> None:
        """Keep a chain on disk while it is read; see ``release``."""
        segment.refs += 1
        self._holds[segment] += 1

    def release(self, segment: Segment) -> None:
        """The reverse of ``hold``."""
        self._holds[segment] -= 1
        if not self._holds[segment]:
            del self._holds[segment]
        self._drop_reference(segment)

    def uses(self, owner: Owner) -> bool:
        """Whether files of a session are being written or read."""
        held = (segment for tip in self._holds for segment in tip.chain())
        return any(segment.owner == owner for segment in (*self._planned, *held))

    @property
    def stats(self) -> TierStats:
        return TierStats(self.space.used + self.space.beside, self.space.budget, self.evictions)

    @staticmethod
    def holding(tip: Segment, tokens: int) -> TierHolding:
        """``tokens`` of the timeline that ends in ``tip``, and the bytes of all its files, including shared ones."""
        return TierHolding(tokens, sum(segment.nbytes for segment in tip.chain()))

    # -- starting ---------------------------------------------------------------------------------------------------

    def scan(self) -> None:
        """Index the files that earlier processes have written; temporary, damaged and superseded files are removed.
        Raises OSError, and BlockingIOError if another process uses the folder.
        """
        self._other_models = [
            other for other in self.segment_folder.open() if other.folder.name not in self._kept_models
        ]
        fresh, damaged, unread = self.segment_folder.read()
        for place in damaged:
            self._discard_damaged(place)
        self.space.set_free(self.segment_folder.measure())
        self.adopt(fresh, unread=unread)

    def adopt(
        self, fresh: dict[Place, LooseSegment], used: float | None = None, unread: Collection[Place] = ()
    ) -> None:
        """Add files to the tree, except those whose ancestors are ``unread``. The last use of their sessions is the
        time at which they were written, or ``used``.
        """
        joined = [segment for place in fresh for segment in self._join(place, fresh, unread)]
        for segment in sorted(joined, key=lambda segment: segment.sequence):
            head = self.heads.get(segment.owner)
            if segment.orphan:
                continue
            if head is None or head.tip.sequence < segment.sequence:
                created = fresh[segment.folder, segment.name].created
                self._set_head(segment.owner, segment, created if used is None else used)
        for segment in joined:
            self._collect(segment)
        for segment in joined:
            head = self.heads.get(segment.owner)
            if head is not None and head.tip is segment:
                partial = segment.refs > 1 or segment.folder in self._damaged_folders
                head.unasked = frozenset(Tier if partial else ())
        self.heads = OrderedDict(sorted(self.heads.items(), key=lambda item: item[1].used))
        self._make_room(0)

    def discard_files(self, places: Iterable[Place]) -> None:
        """Mark files as obsolete that were not added to the tree."""
        for place in places:
            path = self.folder / place[0] / place[1]
            if place not in self._known and path not in self.space.obsolete:
                self.space.mark_obsolete(path, 0)

    def _join(self, place: Place, fresh: dict[Place, LooseSegment], unread: Collection[Place]) -> list[Segment]:
        """Link the segment of a file and its ancestors that are not known yet, and return them. Descendants of a
        missing or damaged file are left out.
        """
        line = [place]
        while line[-1] in fresh and line[-1] not in self._known and len(line) <= len(fresh):
            parent = fresh[line[-1]].parent
            if parent is None:
                break
            line.append(parent)
        if line[-1] in unread:
            return []
        joined = []
        for at in reversed(line):
            if at not in fresh or at in self._known:
                continue
            segment, parent = fresh[at].segment, fresh[at].parent
            if not fresh[at].joins(self._known.get(parent) if parent is not None else None):
                self._discard_damaged(at)
                continue
            self._known.add(segment)
            if segment.parent is not None:
                segment.parent.refs += 1
            self._count(segment, segment.nbytes)
            joined.append(segment)
        return joined

    def _discard_damaged(self, place: Place) -> None:
        """Mark a damaged file as obsolete; counted once."""
        path = self.folder / place[0] / place[1]
        self._damaged_folders.add(place[0])
        if path not in self.space.obsolete:
            self.damaged += 1
            self.space.obsolete[path] = 0

    # -- making room ------------------------------------------------------------------------------------------------

    def _make_room(self, nbytes: int, parent: Segment | None = None) -> bool:
        """Evict until ``nbytes`` more fit the budget and leave the floor free. False, with nobody evicted, if that is
        impossible beside what must stay: the chain of ``parent``, and what is being written or read.
        """
        others = sum(other_model.nbytes for other_model in self._other_models)
        lacking = self.space.bytes_to_evict(nbytes, nbytes + self._coming, others)
        if lacking <= 0:
            return True
        kept = self._kept_segments(parent)
        spare = self.space.used - sum(segment.nbytes for segment in kept)
        if lacking > spare + others:
            return False
        while lacking > 0 and self._other_models:
            other_model = self._other_models.pop()
            self.space.mark_obsolete(other_model.folder, other_model.nbytes)
            lacking -= other_model.nbytes
        aim = self.space.used - lacking
        while self.space.used > aim and (head := self._victim(kept)) is not None:
            self._drop(head)
            self.evictions += 1
        return self.space.used <= aim

    def _victim(self, kept: set[Segment]) -> ChainHead | None:
        return victim((head for head in self.heads.values() if head.tip not in kept), self._shares.over)

    def _kept_segments(self, parent: Segment | None) -> set[Segment]:
        """The segments that cannot be removed now: chains that are being read or written, and that of ``parent``."""
        kept: set[Segment] = set()
        for tip in (*self._planned, *self._holds, parent):
            segment = tip
            while segment is not None and segment not in kept:
                kept.add(segment)
                segment = segment.parent
        return {segment for segment in kept if segment.local or segment in self._planned}

    # -- the tree ---------------------------------------------------------------------------------------------------

    def _set_head(self, owner: Owner, segment: Segment, used: float) -> None:
        """Make ``segment`` the head of ``owner``."""
        segment.refs += 1
        head = self.heads.get(owner)
        if head is None:
            head = self.heads[owner] = ChainHead(owner, segment, used)
        else:
            self._index.remove(owner.tenant, head.tip.long, head)
            old, head.tip, head.used, head.unasked = head.tip, segment, used, frozenset()
            self._drop_reference(old)
        self.heads.move_to_end(owner)
        self._index.put(owner.tenant, segment.long, head)

    def _drop(self, head: ChainHead) -> None:
        del self.heads[head.owner]
        self._index.remove(head.owner.tenant, head.tip.long, head)
        self._drop_reference(head.tip)

    def _drop_reference(self, segment: Segment) -> None:
        segment.refs -= 1
        self._collect(segment)

    def _collect(self, segment: Segment) -> None:
        """Remove a segment without references, and then ancestors that have none left."""
        here: Segment | None = segment
        while here is not None and here.refs == 0 and here.local:
            self._remove_segment(here, collect=False)
            here = here.parent

    def _remove_segment(self, segment: Segment, collect: bool = True) -> None:
        segment.dead = True
        self._count(segment, -segment.nbytes)
        if segment.local:
            segment.local = False
            self._known.remove(segment)
            self.space.mark_obsolete(self.folder / segment.folder / segment.name, segment.nbytes)
        if segment.parent is not None:
            segment.parent.refs -= 1
            if collect:
                self._collect(segment.parent)

    def _count(self, segment: Segment, nbytes: int) -> None:
        self.space.used += nbytes
        self._shares.add(segment.owner.tenant, nbytes)

    def check_integrity(self) -> None:
        """Assert the invariants that hold between calls: the ancestors of a living local segment are living and local
        (except one that is still being read), reference counts and bytes are right, and every head is in the prefix
        index.
        """
        living = {*self._known, *self._planned}
        assert self.space.used == sum(segment.nbytes for segment in living)
        refs: Counter[Segment] = Counter(self._holds)
        refs.update(head.tip for head in self.heads.values())
        refs.update(segment.parent for segment in living if segment.parent is not None)
        reading = {segment for tip in self._holds for segment in tip.chain()}
        for segment in living:
            assert segment.refs == refs[segment], (segment, refs[segment])
            assert segment.local is (segment not in self._planned)
            assert refs[segment] or segment in self._planned, segment
            parent = segment.parent
            assert parent is None or parent.local or parent in self._planned or segment in reading or segment.lost
            assert not segment.dead or segment in self._planned
        self._known.check_integrity()
        for owner, head in self.heads.items():
            assert head.owner == owner
            assert head.tip.local
            assert not head.tip.lost
        assert self._index.check_integrity() == sum(bool(head.shareable) for head in self.heads.values())
        assert self.space.obsolete_bytes >= sum(self.space.obsolete.values())
