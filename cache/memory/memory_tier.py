"""``MemoryTier``: the memory of one tier, with the KV of all layers, one slot per page."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from cache.memory import huge, pinned
from cache.memory.codec import Codec
from cache.memory.frames import UNDIVIDED, Division, Frames, division
from cache.memory.host_offload import HostOffload, host_offload
from cache.memory.pair_kernel import pair_kernel
from cache.memory.record_kernel import record_kernel
from cache.memory.stream import concurrent_stream, copy_to_device, copy_to_host, put
from cache.memory.token_record import TokenRecord


class PageShape(NamedTuple):
    """What one layer stores per token. K and V may differ in heads and width (MLA stores its latents).

    ``index_dim`` is the width of the indexer key of sparse attention, 0 if there is none. ``dtype``: in which the model
    computes; what is stored has it with the codec EXACT. With another one K and V are records, see
    ``cache.memory.token_record``. ``joined``: what is stored is the keys alone, of one head, whose first ``value_dim``
    numbers are the value as well: the rows of layers that attend in the space of their latents.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    dtype: torch.dtype
    index_dim: int = 0
    codec: Codec = Codec.EXACT
    joined: bool = False

    @property
    def key(self) -> TokenRecord | None:
        """How the keys of a token are stored, if not exactly."""
        return None if self.codec is Codec.EXACT else TokenRecord(self.key_heads, self.key_dim, self.codec)

    @property
    def value(self) -> TokenRecord | None:
        """How the values of a token are stored, if not exactly."""
        return None if self.codec is Codec.EXACT else TokenRecord(self.value_heads, self.value_dim, self.codec)

    @property
    def nbytes(self) -> int:
        """Bytes per token."""
        return sum(self.pools)

    @property
    def pools(self) -> tuple[int, ...]:
        """Bytes per token in each pool."""
        values = 0 if self.joined else self.value_heads * self.value_dim
        dims = (self.key_heads * self.key_dim, values, self.index_dim)
        exact = [dim * self.dtype.itemsize for dim in dims]
        if self.key is not None and self.value is not None:
            exact[:2] = self.key.nbytes, self.value.nbytes
        return tuple(size for size in exact if size)


def divide(shapes: Mapping[int, PageShape], near: Iterable[int], page_size: int) -> Division:
    """How pages of these shapes are divided if the layers ``near`` are windowed. Pages with indexer keys are not."""
    if any(shape.index_dim for shape in shapes.values()):
        return UNDIVIDED
    return division(near, {at: tuple(size * page_size for size in shape.pools) for at, shape in shapes.items()})


def layer_of(name: str) -> int:
    """The layer of a named tensor, ``"<layer>.<kind>"``."""
    return int(name.partition(".")[0])


class MemoryTier:
    """``slots`` pages of ``page_size`` tokens in one memory, for all layers of a model.

    For each layer that stores KV there is one K and one V tensor ``[slots, page_size, heads, dim]`` (of records:
    ``[slots, page_size, nbytes]``; indexer keys: ``[slots, page_size, dim]``); a page has the same slot in all of
    them. ``scratch`` adds one last slot, or frame, that is never allocated, for writes of padding rows. Shapes are
    taken from the first write unless given. A ``pinned`` tier is the host tier of a GPU: see ``cache.memory.pinned``.
    Invariant: a slot is either free or owned by exactly one page.

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
        strides = division.stride
        self.scratch = (slots * strides[0], slots * strides[1]) if scratch else None  # its number in each part
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
        self.frames.release(near, slot)

    def fits(self, pages: int, near: int) -> bool:
        """Whether there is room for so many pages, and for the near parts of so many."""
        return self.frames.fits(pages, near)

    def write(self, layer: int, index: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store T tokens: ``index [T]`` holds slot * page_size + offset; ``key`` and ``value`` are ``[1, H, T, D]``."""
        if layer not in self.keys:
            self._create(layer, PageShape(key.shape[1], key.shape[3], value.shape[1], value.shape[3], key.dtype))
        shape, tokens = self.shapes[layer], (key[0].transpose(0, 1), value[0].transpose(0, 1))
        if shape.codec is Codec.EXACT and shape.key_heads == shape.value_heads:
            pair = pair_kernel(shape.key_heads, shape.key_dim, shape.value_dim, shape.dtype, self.device)
            if pair is not None:
                pair.store(self._pair(layer), index, *tokens)
                return
        for pool, record, new in zip(self._pair(layer), (shape.key, shape.value), tokens, strict=True):
            kernel = None if record is None else record_kernel(record, new.dtype, self.device)
            if kernel is not None:
                kernel.store(pool, index, new)
            else:
                pool.index_copy_(0, index, new if record is None else record.pack(new))

    def write_rows(self, layer: int, index: torch.Tensor, rows: torch.Tensor, value_dim: int) -> None:
        """Store T tokens in a joined shape: ``rows [T, D]`` at ``index [T]``, whose first ``value_dim`` numbers are the
        values.
        """
        if layer not in self.keys:
            self._create(layer, PageShape(1, rows.shape[1], 1, value_dim, rows.dtype, joined=True))
        self.keys[layer].flatten(0, 2).index_copy_(0, index, rows)

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
        return self._unpacked(layer, *(pool[table].flatten(0, 1) for pool in (self.keys[layer], self.values[layer])))

    def tokens(self, layer: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the tokens at ``index [n]`` (slot * page_size + offset), as ``[n, H, D]`` in the shape's dtype (a
        copy).
        """
        return self._unpacked(layer, *(pool[index] for pool in self._pair(layer)))

    def _unpacked(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens as they are in the pools of a layer, as ``[n, H, D]``."""
        shape = self.shapes[layer]
        if shape.key is None or shape.value is None:
            return keys, values
        return shape.key.unpack(keys, shape.dtype), shape.value.unpack(values, shape.dtype)

    def _pair(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both pools of a layer with a row for every token."""
        return self.keys[layer].flatten(0, 1), self.values[layer].flatten(0, 1)

    def copy_from(self, other: MemoryTier, source: list[int], target: list[int], near: bool = False) -> None:
        """Copy a part of pages from ``other`` (may be this tier) at slots ``source`` to our slots ``target``."""
        for layer, shape in other.shapes.items():
            if layer not in self.keys:
                self._create(layer, shape)
        mine = self.pools
        for name, tensor in other.pools.items():
            if self.is_near(name) is near:
                self._copy(other, tensor, source, mine[name], target)

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
        joined = {layer for layer, shape in self.shapes.items() if shape.joined}
        values = {layer: pool for layer, pool in self.values.items() if layer not in joined}
        kinds = {"key": self.keys, "value": values, "index": self.indexes}
        return {f"{layer}.{kind}": pool for kind, pools in kinds.items() for layer, pool in pools.items()}

    @property
    def token_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of one token in each named tensor that ``gather`` returns."""
        return {n: (tuple(pool.shape[2:]), str(pool.dtype).removeprefix("torch.")) for n, pool in self.pools.items()}

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all tensors that ``gather`` returns."""
        return self._token_bytes(self.shapes)

    @property
    def near_token_bytes(self) -> int:
        """Bytes of one token in those of windowed layers, if pages are divided."""
        return self._token_bytes(self.near_layers)

    def _token_bytes(self, layers: Collection[int]) -> int:
        return sum(shape.nbytes for layer, shape in self.shapes.items() if layer in layers)

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
        return layer_of(name) in self.near_layers

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
        sizes = ((shape.key_heads, shape.key_dim), (shape.value_heads, shape.value_dim))
        pair = zip((self.keys, self.values), (shape.key, shape.value), sizes, strict=True)
        for pools, record, size in pair:
            if shape.joined and pools is self.values:
                pools[layer] = self.keys[layer][..., : shape.value_dim]
            else:
                pools[layer] = make((record.nbytes,), torch.uint8, near) if record else make(size, shape.dtype, near)
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
        begin = self._offsets[near]
        self._offsets[near] += slot * division.each[near]
        with torch.inference_mode(False):  # as in ``_pool``
            rest = self._memory[begin:]
            return rest[: len(rest) // slot * slot].view(dtype).view(-1, self.page_size, *size)

    def _pool(self, size: tuple[int, ...], dtype: torch.dtype, near: bool) -> torch.Tensor:
        # On a CPU the operating system hands out the memory only as it is written, a huge page at a time.
        with torch.inference_mode(False):  # pages are copied outside of steps too
            shape = (self.slots + (self.scratch is not None), self.page_size, *size)
            if self._pinned:
                pool = pinned.empty(shape, dtype)
            elif self.device.type == "cpu":
                pool = huge.empty(prod(shape), dtype).view(shape)
            else:
                pool = torch.empty(shape, dtype=dtype, device=self.device)
            pool[self.slots :] = 0  # what is read of the scratch is a number
            return pool
