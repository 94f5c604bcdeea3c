"""Cores: how many threads compute on a CPU, unless ``OMP_NUM_THREADS`` says so."""

from __future__ import annotations

import math
import os
from itertools import chain
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

CGROUPS = Path("/sys/fs/cgroup")
SELF = Path("/proc/self/cgroup")
# Weights that a thread has to read in a step, about 0.2 ms of work: with less, threads wait for each other more than
# they do, and keep the server from its core.
BYTES_EACH = 8 << 20


def share(ranks: int = 1) -> None:
    """Use the processors that there are, less than torch would where this process may not use all of them; ranks on one
    machine share them."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), math.floor(processors())) // ranks))


def fit(model: torch.nn.Module) -> None:
    """Use no more threads than the weights of ``model`` give work to."""
    if "OMP_NUM_THREADS" not in os.environ:
        held = chain(model.parameters(), model.buffers())  # quantised weights are buffers
        weights = sum((one.to_local() if isinstance(one, DTensor) else one).nbytes for one in held)
        torch.set_num_threads(max(1, min(torch.get_num_threads(), weights // BYTES_EACH)))


def processors() -> float:
    """How many processors this process may use: those it may run on, or what its cgroups allow if that is less."""
    allowed = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    return min([allowed, *(int(quota) / int(period) for quota, period in _quotas() if quota.isdigit() and int(period))])


def _quotas() -> list[tuple[str, str]]:
    """Microseconds of processor time in so many microseconds, as each cgroup says it; no digits where it is endless."""
    own = next((line for line in _read(SELF).splitlines() if line.startswith("0::")), "0::/")
    folder = CGROUPS / own.removeprefix("0::").strip("/")
    second = [_read(place / "cpu.max") for place in (folder, *folder.parents) if place.is_relative_to(CGROUPS)]
    first = [
        f"{_read(CGROUPS / name / 'cpu.cfs_quota_us')} {_read(CGROUPS / name / 'cpu.cfs_period_us')}"
        for name in ("cpu", "cpu,cpuacct")  # version 1
    ]
    pairs = (text.split() for text in (*second, *first))
    return [(pair[0], pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
