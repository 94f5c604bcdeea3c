"""The list of attention backends of a device, in the order in which they are tried."""

from __future__ import annotations

from typing import Any

import torch

from cache.attention import cpu, triton, varlen
from cache.attention.backend import Backend


def backends(device: torch.device) -> list[Backend[Any]]:
    """Those that are there; what all of them leave is attended to by torch, span by span."""
    if device.type == "cpu":
        found: list[Backend[Any] | None] = [cpu.cpu_backend()]
    else:
        found = [varlen.varlen_backend(device), triton.triton_backend(device)]
    return [backend for backend in found if backend is not None]
