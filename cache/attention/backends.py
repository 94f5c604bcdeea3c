"""The list of attention backends of a device, in the order in which they are tried."""

from __future__ import annotations

from typing import Any

import torch

from cache.attention import cpu, triton, varlen
from cache.attention.backend import Backend


def backends(device: torch.device) -> list[Backend[Any]]:
    """The backends that are available on ``device``. Torch computes the spans that all of them leave, one by one."""
    if device.type == "cpu":
        found: list[Backend[Any] | None] = [cpu.cpu_backend()]
    else:
        found = [varlen.varlen_backend(device), triton.triton_backend(device)]
    return [backend for backend in found if backend is not None]
