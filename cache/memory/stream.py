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
    """A CPU tensor copied to ``device``, with the same shape and dtype. Does not block: the copy is queued on the
    current stream.
    """
    return _ready(tensor, device).to(device, non_blocking=True)


def put(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """``array`` as a tensor of its shape and dtype on ``device``, copied as by ``copy_to_device``."""
    return copy_to_device(torch.from_numpy(array), device)


def refill(tensor: torch.Tensor, array: np.ndarray[Any, Any]) -> None:
    """Copy ``array`` to ``tensor`` (same shape and dtype). Does not block: the copy is queued on the current stream."""
    tensor.copy_(_ready(torch.from_numpy(array), tensor.device), non_blocking=True)


def _ready(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor that ``device`` can read asynchronously: pinned for a GPU. torch keeps that memory until the copy is
    done.
    """
    return tensor.pin_memory() if device.type == "cuda" else tensor


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` copied to the CPU, with the same shape and dtype. Complete when the current stream has reached this
    point.
    """
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class HostCopy:
    """A copy of ``tensors`` of one device to the CPU, queued behind all earlier work on the current stream."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._here = [copy_to_host(tensor) for tensor in tensors]
        self._there: torch.cuda.Event | None = None
        if tensors[0].device.type == "cuda":
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._there.record(torch.cuda.current_stream(tensors[0].device))

    def wait(self) -> list[torch.Tensor]:
        """Wait for the copy; returns the tensors, of the shapes and dtypes that they had, on the CPU."""
        if self._there is not None:
            self._there.synchronize()
        return self._here


@contextmanager
def concurrent_stream(device: torch.device) -> Iterator[None]:
    """Within it, the calling thread's work on ``device`` runs concurrently with steps, on a stream of that thread.

    It begins after all work that is queued for steps, and is complete when the block ends; only this thread waits.
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
