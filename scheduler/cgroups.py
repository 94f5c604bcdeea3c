"""Control groups: the limits of processors and memory that Linux sets for this process, with cgroups of version 2 or 1.

Used by the engine process, and by ``warmturn doctor`` in the server's. Imports nothing of this project and no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
SELF = Path("/proc/self/cgroup")


def processor_limit() -> float | None:
    """Processors' worth of time that the cgroups allow, the least of them all; None without a limit."""
    limits = []
    for folder in _folders("cpu"):
        first = f"{read_text(folder / 'cpu.cfs_quota_us')} {read_text(folder / 'cpu.cfs_period_us')}"  # version 1
        for text in (read_text(folder / "cpu.max"), first):
            quota, _, period = text.partition(" ")  # microseconds of time in so many microseconds
            if quota.isdigit() and period.isdigit() and int(period):
                limits.append(int(quota) / int(period))
    return min(limits, default=None)


def memory_limit() -> int | None:
    """Bytes of memory that the cgroups allow, the least of them all; None without a limit. Version 1 writes a number
    beyond any machine's memory where there is none.
    """
    names = ("memory.max", "memory.limit_in_bytes")
    texts = (read_text(folder / name) for folder in _folders("memory") for name in names)
    return min((int(text) for text in texts if text.isdigit()), default=None)


def physical_memory() -> int:
    """Bytes of RAM that this process may use: the machine's, or what its cgroups allow if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, memory_limit() or total)


def _folders(controller: str) -> Iterator[Path]:
    """The folders of the cgroups that this process is in, the innermost first, for version 2 and then for version 1,
    which has one for each controller. In a container only the outermost may be visible.
    """
    lines = (line.split(":", 2) for line in read_text(SELF).splitlines())
    own = {line[1]: line[2] for line in lines if len(line) == 3 and ".." not in line[2]}
    for names in dict.fromkeys(["", controller, *(names for names in own if controller in names.split(","))]):
        root = ROOT / names
        folder = root / own.get(names, "").strip("/")
        yield from (place for place in (folder, *folder.parents) if place.is_relative_to(root))


def read_text(path: Path) -> str:
    """A small file's text; empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
