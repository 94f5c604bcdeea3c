"""The order of copies between device, host and disk: of all accesses to pages each waits for those that it must."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from happens_before import Event, Machine, Race, Stream

from cache.memory import host_offload, stream
from cache.memory import memory_tier as tiers
from cache.memory.host_offload import HostOffload
from cache.memory.memory_tier import MemoryTier, PageShape

CPU, PAGE = torch.device("cpu"), 4


class Gpu:
    """A device by its type alone."""

    type = "cuda"


class Pages:
    """A tier of a GPU and one of pinned host memory, and what steps, other threads and copies do with their pages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine = Machine()
        self.machine.patch(monkeypatch)
        monkeypatch.setattr(host_offload, "_BYTES", 2 * PAGE * 2 * 8 * 4)  # a buffer: two pages of a pool
        monkeypatch.setattr(stream, "_mine", SimpleNamespace())
        monkeypatch.setattr(tiers, "put", lambda array, device: torch.from_numpy(array))
        monkeypatch.setattr(tiers, "copy_to_device", lambda tensor, device: tensor)
        offload = HostOffload(CPU)
        monkeypatch.setattr(tiers, "host_offload", lambda device: offload)
        shapes = {0: PageShape(2, 8, 2, 8, torch.float32)}
        self.device, self.pinned = (MemoryTier(16, PAGE, CPU, dict(shapes)) for _ in range(2))
        self.device.device, self.pinned._pinned = Gpu(), True  # type: ignore[assignment]

    def write(self, *slots: int) -> None:
        """A step stores tokens in pages."""
        rows = torch.tensor([slot * PAGE + offset for slot in slots for offset in range(PAGE)])
        self.device.write(0, rows, *torch.ones(2, 1, 2, len(rows), 8))

    def attend(self, *slots: int) -> None:
        """A step reads pages."""
        self.device.keys[0].index_select(0, torch.tensor(slots))

    def offload(self, source: list[int], target: list[int]) -> None:
        """To host memory."""
        self.pinned.copy_from(self.device, source, target)

    def restore(self, source: list[int], target: list[int]) -> None:
        """From host memory."""
        self.device.copy_from(self.pinned, source, target)

    def save(self, *slots: int) -> None:
        """Another thread reads pages of the host tier, to write them to disk."""
        with self.machine.beside("disk"):
            self.pinned.settle()
            for slot in slots:
                self.machine.host(self.pinned.keys[0][slot])

    def save_from_device(self, *slots: int) -> None:
        """Another thread reads pages of the device, to write them to disk."""
        rows = torch.tensor([slot * PAGE + offset for slot in slots for offset in range(PAGE)])
        with self.machine.beside("disk"):
            for tensor in self.device.gather(rows).values():
                self.machine.host(tensor)

    def load(self, *slots: int) -> None:
        """Another thread reads pages from disk, and the thread of steps hears that it has."""
        rows = torch.tensor([slot * PAGE + offset for slot in slots for offset in range(PAGE)])
        with self.machine.beside("disk"):
            for name in self.device.pools:
                self.device.scatter(rows, name, torch.ones(len(rows), 2, 8))
            done = self.machine.thread.known
        self.machine.thread.learn(done)


def away_and_back(pages: Pages) -> None:
    """Pages leave the device, other tokens take their place at once, and they come back elsewhere."""
    pages.write(*range(12))
    pages.offload([*range(12)], [*range(12)])  # more than all buffers hold
    pages.write(*range(12))
    pages.restore([*range(8)], [12, 13, 14, 15, 0, 1, 2, 3])
    pages.attend(12, 13, 0)
    pages.offload([4, 5], [0, 1])  # to slots that have just been read
    pages.write(4)


def to_disk(pages: Pages) -> None:
    """From the host tier, while steps go on."""
    pages.write(0, 1)
    pages.offload([0, 1], [2, 3])
    pages.save(2, 3)
    pages.write(0, 1)


def from_device_to_disk(pages: Pages) -> None:
    """Without a host tier: stored tokens do not change, and steps go on in other pages."""
    pages.write(0, 1)
    pages.save_from_device(0, 1)
    pages.write(2)


def from_disk(pages: Pages) -> None:
    """To pages whose former tokens a step has read."""
    pages.write(0, 1)
    pages.attend(0, 1)
    pages.load(0, 1)
    pages.attend(0, 1)


STORIES = [away_and_back, to_disk, from_device_to_disk, from_disk]


@pytest.mark.parametrize("story", STORIES)
def test_no_copy_accesses_a_page_too_early(story: Callable[[Pages], None], monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Pages(monkeypatch)
    with pages.machine:
        story(pages)
    assert len({access.actor for access in pages.machine.accesses}) > 1


@pytest.mark.parametrize(
    ("story", "kind", "method", "nth"),
    [
        (away_and_back, Stream, "wait_stream", 1),  # of a copy down for the step that wrote
        (away_and_back, Stream, "wait_stream", -1),  # of the last copy down, of a page that a step has just written
        (away_and_back, Event, "record", 0),  # all: buffers are taken while they are in use
        (away_and_back, Stream, "wait_event", 0),
        (to_disk, Stream, "wait_stream", 1),
        (to_disk, Stream, "synchronize", 0),  # in ``settle``
        (from_device_to_disk, Stream, "wait_stream", 0),
        (from_device_to_disk, Stream, "synchronize", 0),
        (from_disk, Stream, "wait_stream", 0),
        (from_disk, Stream, "synchronize", 0),
    ],
)
def test_each_wait_is_needed(
    story: Callable[[Pages], None], kind: Any, method: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``nth``: the only call that is left out, counted from 1 or from the end; 0: all are."""
    real, calls, left_out = getattr(kind, method), list[int](), 0

    def counted(*args: Any) -> None:
        calls.append(1)
        real(*args)

    def planted(*args: Any) -> None:
        calls.append(1)
        if left_out and len(calls) != left_out:
            real(*args)

    with monkeypatch.context() as counting:
        counting.setattr(kind, method, counted)
        pages = Pages(monkeypatch)
        with pages.machine:
            story(pages)
    left_out = len(calls) + 1 + nth if nth < 0 else nth
    calls.clear()
    monkeypatch.setattr(kind, method, planted)
    pages = Pages(monkeypatch)
    with pages.machine, pytest.raises(Race):
        story(pages)
