"""Host memory that a GPU copies from and to: as much as was asked for, locked as long as it is there, and no longer."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
from collections.abc import Iterator

import pytest
import torch

from cache.memory import pinned
from cache.memory.memory_tier import MemoryTier, PageShape

CPU = torch.device("cpu")
SHAPES = {0: PageShape(2, 8, 2, 8, torch.bfloat16), 1: PageShape(3, 5, 1, 7, torch.float32, 4)}


class Cuda:
    """CUDA's runtime as far as locking goes: 0 is success."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.last = b""  # of what was unlocked last, its first byte then
        self.fails = False
        self.pending = False  # a failure that the next launch will be told of
        self.waited = 0

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        """Whole pages of the system that nothing else is locked in."""
        assert flags == 0
        assert nbytes > 0
        assert pointer % mmap.PAGESIZE == nbytes % mmap.PAGESIZE == 0
        assert all(pointer + nbytes <= at or at + size <= pointer for at, size in self.locked.items())
        self.pending |= self.fails
        if self.fails:
            return 801
        self.locked[pointer] = nbytes
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        """The memory is there still."""
        assert self.waited
        self.last = ctypes.string_at(pointer, self.locked.pop(pointer))[:1]
        return 0

    def synchronize(self) -> None:
        """Nothing is copied any more."""
        self.waited += 1

    def ones(self, size: int, device: str) -> None:
        """``torch.ones``: a launch."""
        assert device == "cuda"
        pending, self.pending = self.pending, False
        if pending:
            raise RuntimeError("operation not supported")

    @staticmethod
    def check_error(status: int) -> None:
        """``torch.cuda.check_error``."""
        if status:
            raise RuntimeError(f"operation not supported ({status})")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    found = Cuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    for name in ("check_error", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    monkeypatch.setattr(torch, "ones", found.ones)
    pinned._tell.cache_clear()
    yield found
    gc.collect()


def test_a_host_tier_locks_what_it_was_given_and_hardly_more(cuda: Cuda) -> None:
    tier = MemoryTier(1025, 16, CPU, SHAPES, pinned=True)  # a little more than a power of two
    pools = tier.pools.values()
    assert len(cuda.locked) == len(pools) == 5
    for pool in pools:
        assert pool.data_ptr() in cuda.locked
        assert 0 <= cuda.locked[pool.data_ptr()] - pool.nbytes < mmap.PAGESIZE
        assert pool.is_contiguous()
    other = MemoryTier(1025, 16, CPU, SHAPES)
    assert [pool.shape for pool in pools] == [pool.shape for pool in other.pools.values()]
    assert [pool.dtype for pool in pools] == [pool.dtype for pool in other.pools.values()]


def test_it_stays_locked_while_anyone_looks_at_it(cuda: Cuda) -> None:
    tensor = pinned.empty((5, 16, 2), torch.float16)
    tensor.view(torch.uint8).fill_(7)
    part = tensor[3].view(torch.int16)
    del tensor
    gc.collect()
    assert len(cuda.locked) == 1
    assert (part == 0x0707).all()
    del part
    gc.collect()
    assert not cuda.locked
    assert cuda.last == b"\x07"


def test_memory_that_cannot_be_locked_is_memory(cuda: Cuda, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "warmturn.engine")
    cuda.fails = True
    tier = MemoryTier(9, 4, CPU, SHAPES, pinned=True)
    assert [record.getMessage().endswith("(801)") for record in caplog.records] == [True]
    tier.keys[0].fill_(3)
    assert tier.read(0, torch.tensor([2, 5]))[0].eq(3).all()
    del tier
    gc.collect()
    assert cuda.waited == 0  # nothing to unlock
    assert not cuda.pending  # no step is told of it


def test_a_tier_of_no_pages_locks_nothing(cuda: Cuda) -> None:
    tier = MemoryTier(0, 16, CPU, SHAPES, pinned=True)
    assert tier.keys[0].shape == (0, 16, 2, 8)
    assert not cuda.locked
