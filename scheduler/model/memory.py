"""Sizes of the tiers: how many pages fit the budgets, and building the session store and the archive with them."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import torch

from cache import whole_files
from cache.memory.codec import Codec
from cache.memory.frames import UNDIVIDED, Division
from cache.memory.memory_tier import MemoryTier, PageShape, divide
from cache.pages.layers import Windows
from cache.pages.pool import PagePool
from cache.pages.state import nbytes
from cache.store import SessionStore
from cache.tiers.archive import Archive
from cache.tiers.disk import DiskTier
from cache.tiers.segment_store import SegmentStore
from scheduler import disk_floor
from scheduler.cgroups import physical_memory
from scheduler.engine_config import EngineConfig
from scheduler.model.verdict import Verdict
from scheduler.parallel.followers import Followers
from scheduler.parallel.rank_commands import DEVICE, HOST
from scheduler.parallel.ranks import RankedTier, RankLost

log = logging.getLogger("warmturn.engine")

_SMALLEST = 4  # pages: below that not even a short chat fits
_STATES = 3  # what one idle session keeps at least: its state and the checkpoints of its last turn
_MOST = 1 << 20  # pages: more are never needed where a token takes next to nothing


class TooSmall(ValueError):
    """A budget or folder for KV cannot be used; the message is one line for people."""


def build_store(
    config: EngineConfig,
    verdict: Verdict,
    page_size: int,
    device: torch.device,
    threshold: int | None = None,
    followers: Followers | None = None,
) -> SessionStore:
    """A session store within the budgets of ``config``. Raises ``TooSmall``.

    Where sessions keep states beside their pages, idle states may take half of the budget. The budget of device memory
    is that of each rank, that of host memory is for all of them.
    """
    budget = config.kv_memory
    if budget is None:
        budget = spare(device) if followers is None else min(spare(device, len(followers)), followers.free_memory())
        budget = int(budget * config.memory_share) if device.type == "cpu" else within_share(budget, config, device)
    stateful = verdict.mode.stateful
    cuda = device.type == "cuda"
    windows = verdict.windows
    parts = UNDIVIDED if windows is None else divide(verdict.shapes, windows.layers, page_size)
    page_bytes = parts.nbytes or max(1, page_size * verdict.token_bytes)
    slots = min(budget // (2 if stateful else 1) // page_bytes - cuda, _MOST)  # a scratch page, for graphs
    if slots < _SMALLEST:
        need = (_SMALLEST + cuda) * page_bytes * (2 if stateful else 1)
        raise TooSmall(
            f"--kv-memory {budget} bytes hold {slots} pages of {page_bytes} bytes; at least {need} are needed"
        )
    _tell_bounds(config, slots * page_bytes * (2 if stateful else 1), device)
    host_share = int(physical_memory() * config.memory_share) // 4 if cuda else 0
    host_budget = config.host_memory if config.host_memory is not None else host_share
    host_slots = min(host_budget // (page_bytes * config.tensor_parallel), _MOST)
    states = (budget + host_budget) // 2 if stateful else None
    one = _STATES * nbytes(verdict.skeleton)
    if states is not None and verdict.mode.caches and states < one:
        raise TooSmall(f"one session's state takes {one} bytes; --kv-memory must be at least {2 * one}")
    try:
        if cuda and host_slots * page_bytes * config.tensor_parallel > physical_memory():
            raise MemoryError  # pages that GPUs copy from are taken at once: the system would end processes for them
        pool = _pages(verdict.shapes, slots, host_slots, page_size, device, followers, parts, windows)
    except RankLost:
        raise
    except (RuntimeError, MemoryError) as error:  # the allocator's
        raise TooSmall(
            f"this machine cannot reserve {budget} bytes for KV and {host_budget} for its host tier"
        ) from error
    return SessionStore(pool, states, threshold, config.tenant_share)


def _tell_bounds(config: EngineConfig, used: int, device: torch.device) -> None:
    """Tell of a budget that is more than can be used. ``used`` bytes are what is reserved of it."""
    wanted = config.kv_memory
    if wanted is None:
        return
    if wanted > 2 * used:
        log.warning("--kv-memory: %d bytes are more than can be used; %d are reserved", wanted, used)
    if device.type == "cpu" and used > physical_memory():
        log.warning("--kv-memory: %d bytes are more than this machine's memory of %d bytes", used, physical_memory())


def _pages(
    shapes: dict[int, PageShape],
    slots: int,
    host_slots: int,
    page_size: int,
    device: torch.device,
    followers: Followers | None,
    parts: Division,
    windows: Windows | None,
) -> PagePool:
    """The two tiers, on all ranks."""
    cuda, cpu = device.type == "cuda", torch.device("cpu")
    below = shapes if host_slots else None
    if followers is None:
        tier = MemoryTier(slots, page_size, device, shapes, scratch=cuda, division=parts)
        host = MemoryTier(host_slots, page_size, cpu, below, pinned=cuda, division=parts)
        return PagePool(tier, host, windows)
    followers.create_tiers(slots, host_slots, page_size, known=True, division=parts)
    ranked = RankedTier(followers, DEVICE, slots, page_size, device, shapes=shapes, division=parts)
    host = RankedTier(followers, HOST, host_slots, page_size, cpu, shapes=below, pinned=cuda, division=parts)
    return PagePool(ranked, host, windows)


def build_archive(config: EngineConfig, store: SessionStore, fingerprint: str) -> Archive | None:
    """The tiers below memory, as ``config`` asks for them; None without a disk tier. Raises ``TooSmall`` where its
    folder cannot be used.
    """
    if config.kv_folder is None or config.disk_space == 0:
        return None
    folder = Path(config.kv_folder)
    try:
        folder = folder.parent.resolve() / folder.name  # links on the way are the user's; the folder itself is none
        whole_files.make_folder(folder)
        disk = shutil.disk_usage(folder)
        floor = config.disk_floor if config.disk_floor is not None else disk_floor.floor(disk.total)
        stored = sum(file.stat().st_size for file in folder.rglob("*.kv"))
        budget = config.disk_space if config.disk_space is not None else (disk.free + stored) // 10
        tier = DiskTier(folder, fingerprint, budget, floor, config.tenant_share, config.kv_kept)
        lower: list[SegmentStore] = []  # nearest first
        if config.remote is not None:
            from cache.tiers.remote import RemoteTier  # its library takes long to import

            lower.append(RemoteTier(config.remote, fingerprint, config.remote_space))
        return Archive(store, tier, Codec(config.kv_at_rest), lower)
    except BlockingIOError as error:
        raise TooSmall("another engine is using the folder of stored KV") from error
    except OSError as error:
        raise TooSmall(f"the folder of stored KV cannot be used: {error.strerror}") from error
    except ValueError as error:
        raise TooSmall(f"--remote: {error}") from error


def within_share(free: int, config: EngineConfig, device: torch.device) -> int:
    """Of ``free`` bytes on a GPU those that this engine may take: its share of the GPU less a tenth, without what its
    weights have taken of that.
    """
    if config.memory_share >= 1.0:
        return free
    total = torch.cuda.mem_get_info(device)[1]
    return min(free, max(0, int((total - total // 10) * config.memory_share) - torch.cuda.memory_allocated(device)))


def spare(device: torch.device, ranks: int = 1) -> int:
    """The default budget: on CUDA what is free now less a tenth for activations, on a CPU a quarter of the RAM that
    ``ranks`` share.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, free - total // 10)
    return physical_memory() // 4 // ranks
