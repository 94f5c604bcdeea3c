"""Memory that is free goes back to the system."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from cache.memory.heap import give_back

BLOCK, COUNT = 64 << 10, 1024


def resident() -> int:
    """Bytes of this process in memory."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def test_free_memory_below_a_block_in_use_is_given_back() -> None:
    library = ctypes.CDLL(None)
    if not hasattr(library, "malloc_trim") or not Path("/proc/self/status").exists():
        pytest.skip("another system's allocator")
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    blocks = [library.malloc(BLOCK) for _ in range(COUNT)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    last = max(blocks)
    blocks.remove(last)
    for block in blocks:
        library.free(block)
    held = resident()
    give_back()
    assert resident() < held - BLOCK * COUNT // 2
    library.free(last)
