"""Captures without a GPU: what they ask of torch, and what they leave behind where they fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from scheduler.model.cuda_capture import CudaCapture


class Device:
    """torch.cuda of torch 2.11, as far as captures need it: what fails in a capture leaves its pool recording."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recording: set[int] = set()
        self.pools = 0
        self.streams: list[str] = ["steps"]
        self.sync = 0
        replaced: dict[str, Any] = {
            "CUDAGraph": lambda: type("Graph", (), {"replay": lambda graph: "replayed"})(),
            "graph": self._graph,
            "graph_pool_handle": self._pool,
            "current_stream": lambda: self.streams[-1],
            "current_device": lambda: 0,
            "set_stream": self.streams.append,
            "get_sync_debug_mode": lambda: self.sync,
            "set_sync_debug_mode": self._set_sync,
        }
        for name, double in replaced.items():
            monkeypatch.setattr(torch.cuda, name, double)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self._end, raising=False)

    def _pool(self) -> int:
        self.pools += 1
        return self.pools

    def _set_sync(self, mode: str | int) -> None:
        self.sync = mode if isinstance(mode, int) else {"default": 0, "warn": 1, "error": 2}[mode]

    def _end(self, device: int, pool: int) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    @contextmanager
    def _graph(self, graph: Any, pool: int, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.recording.add(pool)
        self.streams.append("capture")
        yield  # an error leaves all of it as it is
        self.streams.pop()
        self.recording.remove(pool)

    def empty_cache(self) -> None:
        assert not self.recording, "captures_underway.empty()"


def failing() -> torch.Tensor:
    raise torch.OutOfMemoryError("out of memory in a capture")


def test_a_capture_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    capture = CudaCapture()
    with pytest.raises(torch.OutOfMemoryError):
        capture(failing)
    device.empty_cache()
    assert device.streams[-1] == "steps"
    assert capture(lambda: torch.ones(1))() == "replayed"
    device.empty_cache()
    assert device.pools == 2  # the first is not used again


def test_where_torch_has_ended_the_pool_itself_the_error_is_the_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)

    def ended() -> torch.Tensor:
        device.recording.clear()
        return failing()

    with pytest.raises(torch.OutOfMemoryError):
        CudaCapture()(ended)


@pytest.mark.parametrize("before", [0, 1])
def test_what_waits_is_an_error_while_it_is_watched(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    device.sync = before
    capture = CudaCapture()
    seen: list[int] = []
    watch: Callable[[], Any] = capture.watched
    with watch():
        seen.append(device.sync)
    with pytest.raises(KeyError), watch():
        raise KeyError
    assert seen == [2]
    assert device.sync == before
