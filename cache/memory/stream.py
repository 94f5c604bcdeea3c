"""Copies between host and device that do not block: the inputs of a step, results for the host, and copies on a stream
beside the steps.

On a CPU these are plain copies or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import numpy as np
import torch

_mine = local()  # the stream of each thread


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on ``device``, of the same shape and dtype. Nothing waits for the device: the copy takes its turn on
    the current stream.
    """
    return _ready(tensor, device).to(device, non_blocking=True)


def put(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """``array`` on ``device``, as ``copy_to_device``."""
    return copy_to_device(torch.from_numpy(array), device)


def refill(tensor: torch.Tensor, array: np.ndarray[Any, Any]) -> None:
    """Make ``tensor`` hold ``array``, without waiting: the copy takes its turn on the current stream."""
    tensor.copy_(_ready(torch.from_numpy(array), tensor.device), non_blocking=True)


def _ready(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor where ``device`` reads by itself: torch keeps that memory until the copy is done."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` on the CPU, of the same shape and dtype, there when the current stream has come to this."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class HostCopy:
    """``tensors`` of one device on their way to the CPU, behind all that the current stream has been asked for."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._here = [copy_to_host(tensor) for tensor in tensors]
        self._there: torch.cuda.Event | None = None
        if tensors[0].device.type == "cuda":
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._there.record(torch.cuda.current_stream(tensors[0].device))

    def wait(self) -> list[torch.Tensor]:
        """The tensors, once they are there."""
        if self._there is not None:
            self._there.synchronize()
        return self._here


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Within it, what the calling thread asks of ``device`` runs beside the steps, on a stream of that thread.

    It begins behind all that the steps had asked for, and is done when the block ends: only this thread waits.
    """
    if device.type != "cuda":
        yield
        return
    streams: dict[torch.device, torch.cuda.Stream] = _mine.__dict__.setdefault("streams", {})
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream = streams[device]
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
