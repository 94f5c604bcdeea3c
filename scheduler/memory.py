"""How much memory there is for KV, in pages."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from cache.pages import PagePool
from cache.tier import MemoryTier, PageShape
from scheduler.messages import EngineConfig

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_SMALLEST = 4  # pages: below that not even a short chat fits


class TooSmall(ValueError):
    """The budget holds no usable number of pages; the message is one line for people."""


def build_pool(config: EngineConfig, shapes: dict[int, PageShape], page_size: int, device: torch.device) -> PagePool:
    """A page pool within the budgets of ``config``. Raises ``TooSmall``."""
    page_bytes = page_size * sum(shape.nbytes for shape in shapes.values())
    budget = config.kv_memory if config.kv_memory is not None else _spare(device)
    slots = budget // page_bytes
    if slots < _SMALLEST:
        need = _SMALLEST * page_bytes
        raise TooSmall(
            f"{budget} bytes of KV memory hold {slots} pages of {page_bytes}; --kv-memory must be at least {need}"
        )
    host_budget = config.host_memory
    if host_budget is None:
        host_budget = physical_memory() // 4 if device.type == "cuda" else 0
    host_slots = host_budget // page_bytes
    cuda = device.type == "cuda"
    tier = MemoryTier(slots, page_size, device, shapes)
    host = MemoryTier(host_slots, page_size, torch.device("cpu"), shapes if host_slots else None, pinned=cuda)
    return PagePool(tier, host)


def physical_memory() -> int:
    """Bytes of RAM that this process may use: the machine's, or its container's if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no cgroup, or "max"
        return total


def _spare(device: torch.device) -> int:
    """The default budget: on CUDA what is free now less a tenth for activations, on a CPU a quarter of the RAM."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, free - total // 10)
    return physical_memory() // 4
