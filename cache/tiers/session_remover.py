"""``SessionRemover``: removes what the disk and the tiers below it hold of a session."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from cache.segments.chain import Owner, Segment
from cache.tiers.disk import DiskTier
from cache.tiers.io_threads import WorkQueue
from cache.tiers.remover import Remover
from cache.tiers.segment_export import cut
from cache.tiers.tier_sync import TierSync
from cache.whole_files import CorruptFile

Callback = Callable[[], None]


class SessionRemover:
    """Removes sessions from ``disk``, then from the lower tier of each of ``syncs``. Files that are being read or
    written are waited for; files with tokens that other sessions share are cut to these tokens.
    """

    def __init__(self, disk: DiskTier, syncs: Sequence[TierSync], remover: Remover, writer: WorkQueue) -> None:
        """``writer`` is the thread that writes files, ``remover`` unlinks them on it."""
        self._disk = disk
        self._syncs = syncs
        self._remover = remover
        self._writer = writer
        self._waiting: dict[Owner, list[Callback]] = {}  # while their files are in use
        self._cutting: set[Owner] = set()  # whose files are being cut to what others share with them

    @property
    def waiting(self) -> bool:
        """Whether files of a session to be removed are still in use."""
        return bool(self._waiting)

    def concerns(self, owner: Owner) -> bool:
        """Whether files of a session are about to be removed or cut, and must not be read."""
        return owner in self._waiting or owner in self._cutting

    def remove(self, owner: Owner, callback: Callback) -> None:
        """Drop a session from the index of every tier, and remove its files as soon as ``poll`` finds them unused.
        ``callback`` is called when they are gone, and never if one cannot be unlinked.
        """
        self._disk.forget(owner)
        for sync in self._syncs:
            sync.block(owner)
        self._waiting.setdefault(owner, []).append(callback)

    def poll(self) -> None:
        """Begin to remove the files that are no longer in use."""
        for owner in [owner for owner in self._waiting if not self._disk.uses(owner)]:
            self._remove_files(owner, self._waiting.pop(owner))

    def _remove_files(self, owner: Owner, callbacks: list[Callback]) -> None:
        marks = [(sync, sync.block(owner)) for sync in self._syncs]

        def on_unlinked() -> None:
            if not marks:
                for callback in callbacks:
                    callback()
                return
            sync, mark = marks.pop(0)
            # what had just come from there goes too
            sync.forget(owner, mark, lambda: self._remover.remove(owner, on_unlinked))

        shared = self._disk.orphans(owner)
        if not shared:
            self._remover.remove(owner, on_unlinked)
            return
        self._cutting.add(owner)
        work = [(segment, *segment.timeline()) for segment in shared]

        def finish(outcome: list[int | None] | Exception) -> None:
            self._cutting.discard(owner)
            sizes = [None] * len(shared) if isinstance(outcome, Exception) else outcome
            for segment, size in zip(shared, sizes, strict=True):
                self._disk.complete_cut(segment, size)
            self._remover.remove(owner, on_unlinked)

        self._writer.submit(lambda: [self._cut(*parts) for parts in work], finish)

    def _cut(self, segment: Segment, ids: array[int], mask: bytearray) -> int | None:
        """On the writer's thread: replace a file by one with only what other sessions need. Returns its size in bytes,
        None if that failed.
        """
        folder, name = self._disk.folder / segment.folder, segment.name
        try:
            return cut(folder, name, segment.owner, ids, mask, folder, name, orphan=True)
        except (CorruptFile, OSError):
            return None
