"""The sessions of a packed step as rank 0 sends them to the other ranks: token ids, lengths, page tables and masks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from cache.pages.session import SessionCache
from scheduler.parallel.rank_commands import PackedForward


class SessionViewSender:
    """Rank 0's end. A page table is told when it is another one than that of the same row in the step before.
    ``divided``: pages have near parts, see ``MemoryTier``.
    """

    def __init__(self) -> None:
        self.divided = False
        self._sent: list[np.ndarray[Any, Any]] = []

    def step(self, work: Sequence[tuple[SessionCache, int]], keep: Sequence[int]) -> PackedForward:
        """The step that feeds ``count`` tokens of each session; all are on one side of a RoPE threshold."""
        tables, near_tables = {}, {}
        self._sent += [np.zeros(0, np.int64)] * (len(work) - len(self._sent))
        for row, (session, _) in enumerate(work):
            if self._sent[row] is not session.slots:
                self._sent[row] = session.slots
                tables[row] = session.slots.tobytes()
                if self.divided:
                    near_tables[row] = session.near_slots.tobytes()
        return PackedForward(
            [session.length for session, _ in work],
            [count for _, count in work],
            b"".join(session.next_tokens(count).tobytes() for session, count in work),
            tables,
            {row: bytes(session.mask) for row, (session, _) in enumerate(work) if session.hidden},
            np.array(keep, np.int64).tobytes(),
            work[0][0].long,
            near_tables,
        )


class SessionView(SessionCache):
    """What a step needs of a session that another process has."""

    def __init__(self) -> None:
        super().__init__("", None)
        self.tokens = array("i")  # those that are owed
        self.fed_before = 0

    @property
    def length(self) -> int:
        return self.fed_before

    def next_tokens(self, count: int) -> array[int]:
        return self.tokens[:count]


class SessionViews:
    """The other end: the sessions of the step in flight, row by row."""

    def __init__(self) -> None:
        self._rows: list[SessionView] = []

    def work(self, step: PackedForward) -> list[tuple[SessionCache, int]]:
        """What ``PackedStep`` is made of."""
        self._rows += [SessionView() for _ in range(len(step.lengths) - len(self._rows))]
        tokens = array("i", step.tokens)
        at = 0
        for row, (view, length, count) in enumerate(zip(self._rows, step.lengths, step.counts, strict=False)):
            if row in step.tables:
                view.on_pages_moved()
                view._slots = np.frombuffer(step.tables[row], np.int64).copy()
            if row in step.near_tables:
                view._near_slots = np.frombuffer(step.near_tables[row], np.int64).copy()
            view.mask = bytearray(step.masks.get(row, b""))
            view.hidden = view.mask.count(0)
            view.fed_before, view.long = length, step.long
            view.tokens, at = tokens[at : at + count], at + count
        return list(zip(self._rows, step.counts, strict=False))
