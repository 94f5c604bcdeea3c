"""``MemoryTier``: the memory of one tier, with the KV of all layers, one slot per page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from cache.memory import pinned
from cache.memory.host_offload import HostOffload, host_offload
from cache.memory.stream import concurrent_stream, copy_to_device, copy_to_host, put


class PageShape(NamedTuple):
    """What one layer stores per token. K and V may differ in heads and width (MLA stores its latents).

    ``index_dim`` is the width of the indexer key of sparse attention, 0 if there is none.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    dtype: torch.dtype
    index_dim: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes per token."""
        width = self.key_heads * self.key_dim + self.value_heads * self.value_dim + self.index_dim
        return width * self.dtype.itemsize


class MemoryTier:
    """``slots`` pages of ``page_size`` tokens in one memory, for all layers of a model.

    For each layer that stores KV there is one K and one V tensor ``[slots, page_size, heads, dim]`` (and ``[slots,
    page_size, dim]`` for indexer keys); a page has the same slot in all of them. ``scratch`` adds one last slot that is
    never allocated, for writes of padding rows. Shapes are taken from the first write unless given. A ``pinned`` tier
    is the host tier of a GPU: see ``cache.memory.pinned``. Invariant: a slot is either in ``_free`` or owned by exactly
    one page.
    """

    def __init__(
        self,
        slots: int,
        page_size: int,
        device: torch.device,
        shapes: dict[int, PageShape] | None = None,
        pinned: bool = False,
        scratch: bool = False,
    ) -> None:
        self.slots = slots
        self.page_size = page_size
        self.device = device
        self.shapes: dict[int, PageShape] = {}
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.indexes: dict[int, torch.Tensor] = {}
        self.scratch = slots if scratch else None
        self._pinned = pinned
        self._host_offload: HostOffload | None = None  # that has brought something here
        self._free = list(range(slots - 1, -1, -1))
        for layer, shape in (shapes or {}).items():
            self._create(layer, shape)

    @property
    def free(self) -> int:
        """Slots that hold no page."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Slots that hold a page."""
        return self.slots - len(self._free)

    def alloc(self) -> int:
        """Allocate a slot; its content is undefined. The caller has checked ``free``."""
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Free a slot."""
        self._free.append(slot)

    def write(self, layer: int, index: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store T tokens: ``index [T]`` holds slot * page_size + offset; ``key`` and ``value`` are ``[1, H, T, D]``."""
        if layer not in self.keys:
            self._create(layer, PageShape(key.shape[1], key.shape[3], value.shape[1], value.shape[3], key.dtype))
        self.keys[layer].flatten(0, 1).index_copy_(0, index, key[0].transpose(0, 1))
        self.values[layer].flatten(0, 1).index_copy_(0, index, value[0].transpose(0, 1))

    def write_index(self, layer: int, index: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Store T indexer keys ``[1, T, D]`` as ``write`` does; returns the layer's whole pool, ``[slots *
        page_size, D]``.
        """
        if layer not in self.indexes:
            self._create_index(layer, key.shape[2], key.dtype)
        pool = self.indexes[layer].flatten(0, 1)
        pool.index_copy_(0, index, key[0])
        return pool

    def read(self, layer: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the pages in ``table [n]``, as ``[n * page_size, H, D]`` (a copy)."""
        self.settle()
        return self.keys[layer][table].flatten(0, 1), self.values[layer][table].flatten(0, 1)

    def copy_from(self, other: MemoryTier, source: list[int], target: list[int]) -> None:
        """Copy pages from ``other`` (may be this tier) at slots ``source`` to our slots ``target``."""
        for layer, shape in other.shapes.items():
            if layer not in self.keys:
                self._create(layer, shape)
        pairs = ((self.keys, other.keys), (self.values, other.values), (self.indexes, other.indexes))
        for mine, theirs in pairs:
            for layer, tensor in theirs.items():
                self._copy(other, tensor, source, mine[layer], target)

    def _copy(
        self, other: MemoryTier, theirs: torch.Tensor, source: list[int], mine: torch.Tensor, target: list[int]
    ) -> None:
        """Copy pages of one pool of ``other`` to this tier."""
        if self._pinned and other.device.type == "cuda":
            self._host_offload = host_offload(other.device)
            self._host_offload.down(theirs, source, mine, target)
        elif other._pinned and self.device.type == "cuda":
            host_offload(self.device).up(theirs, source, mine, target)
        else:
            mine[put(np.array(target), self.device)] = theirs[put(np.array(source), other.device)].to(self.device)

    @property
    def pools(self) -> Mapping[str, torch.Tensor]:
        """The memory of the pages, ``[slots, page_size, heads, dim]`` (indexer keys: ``[slots, page_size, dim]``), by
        the name under which it is saved, ``"<layer>.<kind>"``.
        """
        kinds = {"key": self.keys, "value": self.values, "index": self.indexes}
        return {f"{layer}.{kind}": pool for kind, pools in kinds.items() for layer, pool in pools.items()}

    @property
    def token_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of one token in each named tensor that ``gather`` returns."""
        return {n: (tuple(pool.shape[2:]), str(pool.dtype).removeprefix("torch.")) for n, pool in self.pools.items()}

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all tensors that ``gather`` returns."""
        return sum(shape.nbytes for shape in self.shapes.values())

    def gather(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """A copy of the tokens at ``rows [n]`` (slot * page_size + offset), by pool: ``[n, heads, dim]`` (indexer keys:
        ``[n, dim]``) on the CPU. Beside the steps, from any thread.
        """
        self.settle()
        with concurrent_stream(self.device):
            there = put(rows.numpy(), self.device)
            return {name: copy_to_host(pool.flatten(0, 1).index_select(0, there)) for name, pool in self.pools.items()}

    def scatter(self, rows: torch.Tensor, name: str, tokens: torch.Tensor) -> None:
        """Put ``tokens [n, heads, dim]`` (indexer keys: ``[n, dim]``) of one named tensor at ``rows [n]``, see
        ``gather``; there when it returns. Beside the steps, from any thread.
        """
        with concurrent_stream(self.device):
            pool = self.pools[name].flatten(0, 1)
            pool.index_copy_(0, put(rows.numpy(), self.device), copy_to_device(tokens, self.device))

    def settle(self) -> None:
        """Wait until copies to this tier are complete, before a CPU reads it."""
        if self._host_offload is not None:
            self._host_offload.settle()

    def _create(self, layer: int, shape: PageShape) -> None:
        self.keys[layer] = self._pool((shape.key_heads, shape.key_dim), shape.dtype)
        self.values[layer] = self._pool((shape.value_heads, shape.value_dim), shape.dtype)
        known = self.shapes.get(layer)
        self.shapes[layer] = shape._replace(index_dim=known.index_dim) if known is not None else shape
        if shape.index_dim:
            self._create_index(layer, shape.index_dim, shape.dtype)

    def _create_index(self, layer: int, dim: int, dtype: torch.dtype) -> None:
        self.indexes[layer] = self._pool((dim,), dtype)
        known = self.shapes.get(layer, PageShape(0, 0, 0, 0, dtype))
        self.shapes[layer] = known._replace(index_dim=dim)

    def _pool(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # torch.empty: on a CPU the operating system hands out the memory only as pages are written.
        with torch.inference_mode(False):  # pages are copied outside of steps too
            shape = (self.slots + (self.scratch is not None), self.page_size, *size)
            pool = pinned.empty(shape, dtype) if self._pinned else torch.empty(shape, dtype=dtype, device=self.device)
            pool[self.slots :] = 0  # what is read of the scratch is a number
            return pool
