"""CPU tensors in huge pages (2 MiB), of memory or of a file, from which weights, keys and values are read faster than
from small ones: by a twentieth on some machines, by a quarter on others.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from pathlib import Path

import torch

HUGE = 1 << 21  # bytes of a huge page, on most processors
_SHARED = 32 << 20  # bytes that small tensors share
_LINE = 64  # bytes, of a cache

_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}

_SAMPLES = 16  # places of a mapping that are looked at
_READABLE = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ | mmap.PROT_WRITE} if _PRIVATE else {}

_open = torch.empty(0, dtype=torch.uint8)  # what is left of the last shared stretch


def empty(count: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor ``[count]``, aligned to a cache line. It cannot be resized. Small tensors share an
    allocation, which is freed when all of them are. Falls back to ordinary pages where there are no huge ones. Raises
    MemoryError.
    """
    global _open
    size = -(-count * dtype.itemsize // _LINE) * _LINE
    if size > _SHARED // 2:
        return _stretch(size)[: count * dtype.itemsize].view(dtype)
    if _open.nbytes < size:
        _open = _stretch(_SHARED)
    found, _open = _open[:size], _open[size:]
    return found[: count * dtype.itemsize].view(dtype)


def map_file(fd: int, start: int, nbytes: int) -> torch.Tensor | None:
    """So many bytes of a file from ``start``, a multiple of ``HUGE``, as all processes have them that map it: uint8.
    None where its pages are not huge: some file systems have none, and what was read in small ones stays in them.
    """
    if not _READABLE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    with suppress(OSError, ValueError):
        memory = mmap.mmap(fd, nbytes, offset=start, **_READABLE)  # torch wants to write; nothing is written
        memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        seen = whole[:: -(-nbytes // _SAMPLES)]
        seen.max()  # so that they are there
        if resident(whole)[1] >= min(len(seen) * HUGE, nbytes // HUGE * HUGE) // 2 > 0:
            return whole
    return None


def resident(tensor: torch.Tensor) -> tuple[int, int]:
    """Bytes of the mapping of a tensor of any shape that are in memory, and how many of these are in huge pages, as the
    system tells (Linux). Zeros where it does not. Mappings that follow each other count as one.
    """
    figures, within = {"Rss": 0, "AnonHugePages": 0, "FilePmdMapped": 0}, False
    with suppress(OSError):
        for line in Path("/proc/self/smaps").read_text().splitlines():
            name, _, value = line.partition(":")
            if "-" in name.split(" ")[0]:  # the first line of a mapping
                first, _, last = name.split(" ")[0].partition("-")
                within = int(first, 16) <= tensor.data_ptr() < int(last, 16)
            elif within and name in figures:
                figures[name] = int(value.split()[0]) * 1024
    return figures["Rss"], figures["AnonHugePages"] + figures["FilePmdMapped"]


def _stretch(size: int) -> torch.Tensor:
    """``size`` bytes that begin at a huge page; pages that are never touched take no memory. The mapping is private:
    most systems give no huge pages to shared ones (``/sys/kernel/mm/transparent_hugepage/shmem_enabled``).
    """
    try:
        memory = mmap.mmap(-1, size + HUGE, **_PRIVATE)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no memory for {size} bytes") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE
    return whole[start : start + size]
