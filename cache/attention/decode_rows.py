"""Decode steps as a batch with padding, for models whose attention cannot read pages in place: ``RowsStep`` and the
transformers cache for it, ``RowsCache``.

A session is a row of the batch, ``[rows, 1]`` tokens, and sees as many keys as the longest may have. All sizes are
known beforehand and all addresses stay, so that such a step can be a CUDA graph, whatever a model's attention does with
the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cache.attention.decode import DecodeStep, Tables
from cache.memory.memory_tier import MemoryTier
from cache.pages.layers import AttentionLayer
from cache.pages.packed import PackedCache


class RowsStep(DecodeStep):
    """A ``DecodeStep`` of sessions of up to ``pages`` pages, with ``token_ids`` and ``positions`` ``[rows, 1]``."""

    def __init__(self, tier: MemoryTier, tables: Sequence[Tables], rows: int, pages: int) -> None:
        super().__init__(tier, tables, rows)
        self.token_ids, self.positions = self.token_ids.T, self.positions.T
        self.pages_of_row = pages

    def offsets(self) -> torch.Tensor:
        """The positions: the index of a token in its row is 0."""
        return self.positions

    def seen(self, layer: AttentionLayer) -> torch.Tensor:
        """Which keys each row sees in layers of this kind, bool ``[rows, keys]``."""
        keys = torch.arange(self.pages_of_row * self.tier.page_size, device=self.positions.device)
        return layer.sees(self.positions, keys[None])

    def rows_index(self, layer: AttentionLayer, seen: torch.Tensor) -> torch.Tensor:
        """Slot * page_size + offset of each row's keys, ``[rows * keys]`` int64. A key that is not ``seen [rows,
        keys]``, which may be anything, is one of the scratch page: attention multiplies it by 0.
        """
        near, size = self.is_near(layer), self.tier.page_size
        slots = self.page_tables[near][:, : self.pages_of_row].long()
        places = (slots[:, :, None] * size + torch.arange(size, device=slots.device)).flatten(1)
        assert self.tier.scratch is not None
        return torch.where(seen, places, self.tier.scratch[near] * size).flatten()


class RowsCache(PackedCache):
    """The transformers cache of a ``RowsStep``: ``update`` stores the new keys and values in pages, and returns those
    of all rows, ``[rows, H, keys, D]``. Valid for one forward.
    """

    step: RowsStep

    def _index(self, layer: AttentionLayer) -> torch.Tensor:
        made: dict[Any, torch.Tensor] = self.__dict__.setdefault("_indexes", {})
        if layer.kind not in made:
            made[layer.kind] = self.step.rows_index(layer, self.step.seen(layer))
        return made[layer.kind]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``key_states`` and ``value_states``: ``[rows, H, 1, D]``."""
        step, rows = self.step, self.step.tokens
        new = (part.transpose(0, 2) for part in (key_states, value_states))
        step.tier.write(layer_idx, step.write_positions(layer_idx), *new)
        keys, values = step.tier.tokens(layer_idx, self._index(self.kinds[layer_idx]))
        keys, values = (part.view(rows, -1, *part.shape[1:]).transpose(1, 2) for part in (keys, values))
        return keys.contiguous(), values.contiguous()  # as transformers' own caches return them

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Store indexer keys ``[rows, 1, D]``; returns ``[rows, keys, D]``."""
        step, index = self.step, self._index(self.kinds[layer_idx])
        new = indexer_key_states.transpose(0, 1)
        pool = step.tier.write_index(layer_idx, step.write_positions(layer_idx), new)
        return pool[index].view(step.tokens, -1, pool.shape[1])
