"""Decode steps for CUDA graphs: a packed step of one token per session whose tensors keep their addresses, so that a
captured graph reads new values when it is launched again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cache.attention.triton import Launch, TritonPlan
from cache.attention.work_list import Place, divide, tiles
from cache.memory.memory_tier import MemoryTier
from cache.memory.stream import put, refill
from cache.pages.layers import AttentionLayer
from cache.pages.packed import PackedStep, Span, lay_out_next
from cache.pages.session import SessionCache


class Tables:
    """The page tables of a step's sessions, one row each, ``[rows, pages]`` int32 on the device. Only changed rows are
    copied there. ``near``: of the near parts of pages; 0 for one that does not exist, which is not read.
    """

    def __init__(self, tier: MemoryTier, rows: int, pages: int, near: bool = False) -> None:
        assert tier.scratch is not None
        self.device = torch.full((rows, pages), tier.scratch[near], dtype=torch.int32, device=tier.device)
        self._near = near
        self._nobody = np.array([tier.scratch[near]])
        self._held: list[np.ndarray[Any, Any]] = [self._nobody] * rows

    @property
    def width(self) -> int:
        """The most pages that a session may have."""
        return self.device.shape[1]

    def fill(self, sessions: Sequence[SessionCache], rows: int) -> int:
        """Set the first ``rows`` to the tables of ``sessions`` and to the scratch page behind them. Returns how many
        rows were copied.
        """
        slots = [session.near_slots if self._near else session.slots for session in sessions]
        wanted = slots + [self._nobody] * (rows - len(sessions))
        changed = [row for row, slots in enumerate(wanted) if self._held[row] is not slots]
        if not changed:
            return 0
        sent = np.zeros((len(changed), max(len(wanted[row]) for row in changed)), np.int32)
        for at, row in enumerate(changed):
            sent[at, : len(wanted[row])] = self._held[row] = wanted[row]
        np.maximum(sent, 0, out=sent)
        where = put(np.array(changed), self.device.device)
        self.device[:, : sent.shape[1]].index_copy_(0, where, put(sent, self.device.device))
        return len(changed)


class DecodePlan(TritonPlan):
    """A ``TritonPlan`` of one token per span, whose launches keep their sizes and addresses at all lengths."""

    def __init__(self, rows: int, tables: Sequence[torch.Tensor], positions: torch.Tensor) -> None:
        super().__init__([Place(row, 1, 0) for row in range(rows)], tables, positions)
        self._filled: list[tuple[Launch, AttentionLayer, int, int]] = []

    def fill(self, starts: Sequence[int]) -> None:
        """Set the positions of the spans, 0 for those behind ``starts``, and divide the keys of all launches again."""
        rest = [0] * (len(self.places) - len(starts))
        self.places = [Place(row, 1, start) for row, start in enumerate([*starts, *rest])]
        for launch, layer, programs, block in self._filled:
            made = divide(tiles(self.places, range(len(self.places)), 1, layer), programs, block, 1)
            refill(launch.work, made.pad(launch.items, launch.merges))

    def _launch(
        self, chosen: list[int], rows: int, group: int, layer: AttentionLayer, programs: int, block: int
    ) -> Launch:
        made = divide(tiles(self.places, chosen, 1, layer), programs, block, 1)
        items, merges = len(chosen) + programs, len(chosen)
        launch = Launch(rows, 1, items, merges, put(made.pad(items, merges), self.positions.device))
        self._filled.append((launch, layer, programs, block))
        return launch


class DecodeStep(PackedStep):
    """A step with one token each of up to ``rows`` sessions. Rows without a session, which at first are all of them,
    have position 0 and write to the scratch page. ``tables``: as many as pages have parts.
    """

    def __init__(self, tier: MemoryTier, tables: Sequence[Tables], rows: int) -> None:
        assert tier.scratch is not None
        self.tier = tier
        self.tokens = rows
        self._tables = tables
        self.page_tables = [table.device[:rows] for table in tables]  # of each part of pages
        self._nothing = [place * tier.page_size for place in tier.scratch[: len(tables)]]
        self._numbers = put(self._rows([]), tier.device)
        self.token_ids, self.positions = self._numbers[0:1], self._numbers[1:2]
        self.write_index, self.near_write_index = self._numbers[2], self._numbers[-1]
        nobody = SessionCache("", None)
        self.spans = [Span(nobody, row, 1) for row in range(rows)]
        self.origins = {}
        self.media, self.both_ways = {}, frozenset()  # sessions with media run without graphs
        self.adapted = None  # and so do those with adapters
        self._masks, self._gathers = {}, {}
        self.numbers = frozenset(range(rows))
        self._plan = DecodePlan(rows, self.page_tables, self.positions[0])
        self.plans = {TritonPlan.key(self.numbers): self._plan}

    def fill(self, sessions: Sequence[SessionCache]) -> None:
        """Set the step to the next token of each of ``sessions``, of which there may be fewer than rows."""
        for table in self._tables:
            table.fill(sessions, self.tokens)
        refill(self._numbers, self._rows(sessions))
        self._plan.fill([session.length for session in sessions])

    def _rows(self, sessions: Sequence[SessionCache]) -> np.ndarray[Any, Any]:
        """Token id, position and write index in each part of pages of each row, ``[3 or 4, rows]`` int64."""
        numbers, count = np.zeros((2 + len(self._nothing), self.tokens), np.int64), len(sessions)
        lay_out_next(sessions, numbers[:, :count], self.tier.page_size)
        for nothing, places in zip(self._nothing, numbers[2:], strict=True):
            places[count:] = nothing
        return numbers
