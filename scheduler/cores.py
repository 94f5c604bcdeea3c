"""The number of threads for computing on a CPU, unless ``OMP_NUM_THREADS`` sets it."""

from __future__ import annotations

import math
import os
import sys
from itertools import chain
from typing import Any

import torch

from scheduler import cgroups

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
        held: chain[Any] = chain(model.parameters(), model.buffers())  # quantised weights are buffers
        weights = sum((one.to_local() if is_divided(one) else one).nbytes for one in held)
        torch.set_num_threads(max(1, min(torch.get_num_threads(), weights // BYTES_EACH)))


def is_divided(tensor: Any) -> bool:
    """Whether this is one rank's part of a tensor: a DTensor. Where their module is not imported, nothing is."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def processors() -> float:
    """How many processors this process may use: those it may run on, or what its cgroups allow if that is less."""
    allowed = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    return min(allowed, cgroups.processor_limit() or allowed)
