"""``MemoryTier``: the memory of one tier, with the KV of all layers, one slot per page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from cache.memory import pinned
from cache.memory.frames import UNDIVIDED, Division, Frames, division
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

    @property
    def pools(self) -> tuple[int, ...]:
        """Bytes per token in each pool."""
        dims = (self.key_heads * self.key_dim, self.value_heads * self.value_dim, self.index_dim)
        return tuple(dim * self.dtype.itemsize for dim in dims if dim)


def divided(shapes: Mapping[int, PageShape], near: Iterable[int], page_size: int) -> Division:
    """How pages of these shapes are divided if the layers ``near`` are windowed. Pages with indexer keys are not."""
    if any(shape.index_dim for shape in shapes.values()):
        return UNDIVIDED
    return division(near, {at: tuple(size * page_size for size in shape.pools) for at, shape in shapes.items()})


class MemoryTier:
    """``slots`` pages of ``page_size`` tokens in one memory, for all layers of a model.

    For each layer that stores KV there is one K and one V tensor ``[slots, page_size, heads, dim]`` (and ``[slots,
    page_size, dim]`` for indexer keys); a page has the same slot in all of them. ``scratch`` adds one last slot that is
    never allocated, for writes of padding rows. Shapes are taken from the first write unless given. A ``pinned`` tier
    is the host tier of a GPU: see ``cache.memory.pinned``. Invariant: a slot is either free or owned by exactly one
    page.

    With a ``division`` a page has two slots, one in the pools of the windowed layers ``near_layers`` and one in the
    others'. All pools are then views of one memory of ``slots`` frames, and each frame holds slots of one part.
    """

    def __init__(
        self,
        slots: int,
        page_size: int,
        device: torch.device,
        shapes: dict[int, PageShape] | None = None,
        pinned: bool = False,
        scratch: bool = False,
        division: Division = UNDIVIDED,
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
        self.near_layers = division.near
        self.frames = Frames(slots, division.each, division.stride)
        self._division = division
        self._memory: torch.Tensor | None = None  # of a divided tier
        self._offsets: dict[bool, int] = {False: 0, True: 0}  # of the next pool of each part in a frame
        for layer, shape in (shapes or {}).items():
            self._create(layer, shape)

    @property
    def free(self) -> int:
        """Slots that hold no page; frames, if pages are divided."""
        return self.frames.free

    @property
    def used(self) -> int:
        """Slots that hold a page; frames, if pages are divided."""
        return self.slots - self.frames.free

    def alloc(self, near: bool = False) -> int:
        """Allocate a slot for a part of a page; its content is undefined. The caller has checked ``fits``."""
        return self.frames.alloc(near)

    def release(self, slot: int, near: bool = False) -> None:
        """Free a slot."""
        self.frames.release(near, slot)

    def fits(self, pages: int, near: int) -> bool:
        """Whether there is room for so many pages, and for the near parts of so many."""
        return self.frames.fits(pages, near)

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

    def copy_from(self, other: MemoryTier, source: list[int], target: list[int], near: bool = False) -> None:
        """Copy a part of pages from ``other`` (may be this tier) at slots ``source`` to our slots ``target``."""
        for layer, shape in other.shapes.items():
            if layer not in self.keys:
                self._create(layer, shape)
        pairs = ((self.keys, other.keys), (self.values, other.values), (self.indexes, other.indexes))
        for mine, theirs in pairs:
            for layer, tensor in theirs.items():
                if (layer in self.near_layers) is near:
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

    def gather(self, rows: torch.Tensor, near: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """A copy of the tokens at ``rows [n]`` (slot * page_size + offset), by pool: ``[n, heads, dim]`` (indexer keys:
        ``[n, dim]``) on the CPU. ``near``: their rows in the pools of windowed layers. Beside the steps, from any
        thread.
        """
        self.settle()
        with concurrent_stream(self.device):
            there = put(rows.numpy(), self.device)
            close = there if near is None else put(near.numpy(), self.device)
            found = ((name, pool, close if self.is_near(name) else there) for name, pool in self.pools.items())
            return {name: copy_to_host(pool.flatten(0, 1).index_select(0, at)) for name, pool, at in found}

    def is_near(self, name: str) -> bool:
        """Whether a named tensor belongs to the near part of pages."""
        return bool(self.near_layers) and int(name.partition(".")[0]) in self.near_layers

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
        make = self._view if self._division.near else self._pool
        near = layer in self.near_layers
        self.keys[layer] = make((shape.key_heads, shape.key_dim), shape.dtype, near)
        self.values[layer] = make((shape.value_heads, shape.value_dim), shape.dtype, near)
        known = self.shapes.get(layer)
        self.shapes[layer] = shape._replace(index_dim=known.index_dim) if known is not None else shape
        if shape.index_dim and not self._division.near:
            self._create_index(layer, shape.index_dim, shape.dtype)

    def _create_index(self, layer: int, dim: int, dtype: torch.dtype) -> None:
        self.indexes[layer] = self._pool((dim,), dtype, False)
        known = self.shapes.get(layer, PageShape(0, 0, 0, 0, dtype))
        self.shapes[layer] = known._replace(index_dim=dim)

    def _view(self, size: tuple[int, ...], dtype: torch.dtype, near: bool) -> torch.Tensor:
        """The next pool of a part, in the memory that all pools share: in a frame its slots are side by side."""
        division = self._division
        if self._memory is None:
            self._memory = self._pool((division.nbytes // self.page_size,), torch.uint8, near).view(-1)
        slot = division.nbytes // division.stride[near]
        rest = self._memory[self._offsets[near] :]
        self._offsets[near] += slot * division.each[near]
        return rest[: len(rest) // slot * slot].view(dtype).view(-1, self.page_size, *size)

    def _pool(self, size: tuple[int, ...], dtype: torch.dtype, near: bool) -> torch.Tensor:
        # torch.empty: on a CPU the operating system hands out the memory only as pages are written.
        with torch.inference_mode(False):  # pages are copied outside of steps too
            shape = (self.slots + (self.scratch is not None), self.page_size, *size)
            pool = pinned.empty(shape, dtype) if self._pinned else torch.empty(shape, dtype=dtype, device=self.device)
            pool[self.slots :] = 0  # what is read of the scratch is a number
            return pool
