"""``DiskSpace``: the bytes that KV files take, the limits on them, and files that wait to be unlinked."""

from __future__ import annotations

from pathlib import Path


class DiskSpace:
    """Bytes of one folder of KV files and of its file system. Does no I/O: free space is measured elsewhere, and files
    in ``obsolete`` (with their bytes) are unlinked by a thread.
    """

    def __init__(self, budget: int, floor: int = 0) -> None:
        """``budget``: bytes of all files. ``floor``: bytes of the file system that must stay free."""
        self.budget = budget
        self.floor = floor
        self.used = 0  # by files that are not obsolete
        self.beside = 0  # by files that are no KV, which count against the budget too
        self.obsolete: dict[Path, int] = {}
        self.obsolete_bytes = 0  # of what is obsolete or being unlinked
        self._free: int | None = None  # bytes of the file system, as of the last measurement

    def set_free(self, free: int | None, removed: int = 0) -> None:
        """Set the free bytes of the file system, measured after ``removed`` bytes of obsolete files had been
        unlinked. None: they could not be measured, and then only the budget counts.
        """
        self._free = free
        self.obsolete_bytes -= removed

    def mark_obsolete(self, path: Path, nbytes: int) -> None:
        """Have a file, or a folder of another model, unlinked."""
        self.obsolete[path] = nbytes
        self.obsolete_bytes += nbytes

    def lacking_on_disk(self, coming: int) -> int:
        """Bytes by which ``coming`` more would leave too little of the file system free. Not positive: none."""
        return coming + self.floor - self._free - self.obsolete_bytes if self._free is not None else 0

    def bytes_to_evict(self, nbytes: int, coming: int, others: int) -> int:
        """Bytes that have to be evicted before ``nbytes`` more fit, of ``coming`` bytes that will be written in all,
        beside ``others`` of other models. Not positive: none.
        """
        return max(self.used + self.beside + others + nbytes - self.budget, self.lacking_on_disk(coming))
