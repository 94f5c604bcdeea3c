"""Kernels of Triton that store keys and values, each tried before its first use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from cache.error_line import first_line

log = logging.getLogger("warmturn.engine")


class StoringKernel(Protocol):
    """One that can be compared with what torch stores."""

    def passes(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether it stores the same."""


Kernel = TypeVar("Kernel", bound=StoringKernel)


def tried_kernel(make: Callable[[], Kernel], dtype: torch.dtype, device: torch.device, instead: str) -> Kernel | None:
    """What ``make`` makes, where it passes for ``dtype``; None on a CPU, and None with a line in the log, which says
    what happens ``instead``, where it is not right or there is no Triton.
    """
    if device.type != "cuda":
        return None
    try:
        kernel = make()
        if kernel.passes(dtype, device):
            return kernel
        why = "its results are wrong"
    except Exception as error:  # whatever a compiler or a launch raises
        why = first_line(error, 160)
    log.info("%s: %s", instead, why)
    return None
