"""Measures the limits of a device (memory bandwidth, matrix products, copies from the host), with which benchmarks
compare their times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_call(work: Callable[[], Any], device: torch.device, times: int = 10) -> float:
    """Median seconds of one call."""
    for _ in range(3):
        work()
    taken = []
    for _ in range(times):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        taken.append(time.perf_counter() - started)
    return median(taken)


@dataclass(frozen=True)
class Floors:
    """Bytes a second that are read, or read and written; operations a second; bytes a second from pinned memory."""

    memory: float
    matrix: float
    link: float


def measure(device: torch.device, copied: int, size: int) -> Floors:
    """Sums and copies of ``copied`` bytes and products of matrices of ``size`` rows, all of them random numbers."""
    here = torch.randn(copied // 4, device=device)
    there = torch.empty_like(here)
    memory = max(2 * copied / time_call(lambda: there.copy_(here), device), copied / time_call(here.sum, device))
    n = size
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    matrix = 2 * n**3 / time_call(lambda: a @ b, device)
    pinned = torch.randn(copied // 16, pin_memory=device.type == "cuda")
    up = there[: len(pinned)]
    link = 4 * len(pinned) / time_call(lambda: up.copy_(pinned, non_blocking=True), device)
    return Floors(memory, matrix, link)
