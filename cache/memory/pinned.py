"""Pinned host memory of exactly the size that was asked for.

torch's own pinned allocator rounds sizes up to a power of two, which can waste nearly half of a large block.
"""

from __future__ import annotations

import functools
import logging
import math
import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

log = logging.getLogger("warmturn.engine")


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised pinned tensor of this shape and dtype, in memory pages of its own; it is unpinned when its
    memory is freed.

    If the memory cannot be pinned a warning is logged; copies between it and a GPU are then correct, but block the
    calling thread.
    """
    size = math.prod(shape) * dtype.itemsize
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.empty(pages + mmap.PAGESIZE, np.uint8)
    start = -memory.ctypes.data % mmap.PAGESIZE
    memory = memory[start : start + pages]  # what the tensor's storage keeps
    if size:
        _lock(memory)
    return torch.from_numpy(memory)[:size].view(dtype).view(*shape)


def _lock(memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    """Pin the memory until it is freed."""
    pointer = memory.ctypes.data
    try:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(pointer, memory.nbytes, 0))
    except RuntimeError as error:
        _tell(str(error))
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")  # CUDA tells of a failure again at the next launch: this one, not the model's
        return
    weakref.finalize(memory, _unlock, pointer).atexit = False  # the end of the process unlocks all


def _unlock(pointer: int) -> None:
    with suppress(RuntimeError):  # of a device that is lost
        torch.cuda.synchronize()  # what is still copied from there or to there
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostUnregister(pointer))


@functools.cache
def _tell(reason: str) -> None:
    """Log the failure once, however many pools there are."""
    log.warning("the host tier's memory cannot be pinned, so copies between it and the GPU are slower: %s", reason)
