"""Copies of pages between a GPU and pinned host memory that run concurrently with steps.

Pages are copied by way of a few buffers on the device. Only the stream of the steps reads and writes pages on the
device, only this module's own stream accesses host memory, and events order their use of the buffers. The calls do not
wait for the copies, and a page's slot may be reused as soon as a call returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import torch

from cache.memory.stream import put

_BUFFERS = 4
_BYTES = 16 << 20  # of each


def runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The runs of consecutive numbers in ``slots``: index of the first, its slot, and the length."""
    first = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1:
            yield first, slots[first], at - first
            first = at


class HostOffload:
    """Copies to and from one device. Called by the thread that runs steps; ``settle`` by any thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers = [torch.empty(_BYTES, dtype=torch.uint8, device=device) for _ in range(_BUFFERS)]
        self._used = [torch.cuda.Event() for _ in range(_BUFFERS)]  # type: ignore[no-untyped-call]
        self._next = 0

    def down(self, source: torch.Tensor, there: Sequence[int], target: torch.Tensor, here: Sequence[int]) -> None:
        """Copy the pages ``there`` of a device pool to the slots ``here`` of a pinned pool, both ``[slots, page, ...]``
        with the same dtype. Complete after ``settle``.
        """
        steps = torch.cuda.current_stream(self._device)
        for at, size in self._chunks(source, len(there)):
            buffer, used = self._take(source, size)
            torch.index_select(source, 0, put(np.array(there[at : at + size]), self._device), out=buffer)
            self._stream.wait_stream(steps)
            with torch.cuda.stream(self._stream):
                for first, slot, count in runs(here[at : at + size]):
                    target[slot : slot + count].copy_(buffer[first : first + count], non_blocking=True)
                used.record(self._stream)

    def up(self, source: torch.Tensor, there: Sequence[int], target: torch.Tensor, here: Sequence[int]) -> None:
        """Copy the pages ``there`` of a pinned pool to the slots ``here`` of a device pool, both ``[slots, page, ...]``
        with the same dtype, before any later work on the current stream.
        """
        steps = torch.cuda.current_stream(self._device)
        for at, size in self._chunks(source, len(there)):
            buffer, used = self._take(source, size)
            with torch.cuda.stream(self._stream):
                for first, slot, count in runs(there[at : at + size]):
                    buffer[first : first + count].copy_(source[slot : slot + count], non_blocking=True)
            steps.wait_stream(self._stream)
            target.index_copy_(0, put(np.array(here[at : at + size]), self._device), buffer)
            used.record(steps)

    def settle(self) -> None:
        """Wait until all copies to host memory are complete."""
        self._stream.synchronize()

    @staticmethod
    def _chunks(pool: torch.Tensor, pages: int) -> Iterator[tuple[int, int]]:
        """Index of the first page and number of pages of each chunk that fits a buffer."""
        most = max(1, _BYTES // (pool[0].numel() * pool.element_size()))
        return ((at, min(most, pages - at)) for at in range(0, pages, most))

    def _take(self, pool: torch.Tensor, pages: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """A buffer for that many pages, and the event of its last use, for which both streams wait."""
        self._next = number = (self._next + 1) % _BUFFERS
        nbytes = pages * pool[0].numel() * pool.element_size()
        if self._buffers[number].numel() < nbytes:
            self.settle()
            self._buffers[number] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        used = self._used[number]
        torch.cuda.current_stream(self._device).wait_event(used)
        self._stream.wait_event(used)
        return self._buffers[number][:nbytes].view(pool.dtype).view(pages, *pool.shape[1:]), used


@cache
def host_offload(device: torch.device) -> HostOffload:
    return HostOffload(device)
