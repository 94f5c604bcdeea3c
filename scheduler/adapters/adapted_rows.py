"""``AdaptedRows``: which rows of a step have which adapter, while the step runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch

from cache.memory.stream import put
from scheduler.adapters.adapter import Adapter
from scheduler.adapters.adapter_tables import AdapterTables, Owners

AdapterGroup = tuple[Adapter, torch.Tensor]


class AdaptedRows:
    """The rows of a step by adapter: modules add to each group of rows what its adapter adds, and read their own
    weights once for all of them.
    """

    def __init__(
        self,
        adapters: Sequence[Adapter],
        owners: Owners,
        keep: Owners,
        tables: AdapterTables | None,
        device: torch.device,
    ) -> None:
        """``owners``: of all rows of the step, numbers of ``adapters``. ``keep``: the
        rows whose logits are wanted. ``tables``: of the programs, where there are any."""
        self._adapters = adapters
        self._step = owners
        self._kept = owners[keep]
        self._tables = tables
        self._device = device
        self._current: Owners | None = None  # of the rows with which modules are called
        self._groups: dict[bool, list[AdapterGroup]] = {}

    def running(self) -> AbstractContextManager[None]:
        """Within it modules are called with all rows of the step."""
        return self._called_with(self._step)

    def only(self, rows: slice | Sequence[int]) -> AbstractContextManager[None]:
        """Within it modules are called with these rows of the step, of which one may come again."""
        return self._called_with(np.ascontiguousarray(self._step[rows]))

    def groups(self, rows: int, is_head: bool) -> list[AdapterGroup]:
        """The adapters of a call with so many rows, each with the numbers of its rows, ``[n]`` int64; none while no
        step runs. ``is_head``: the module gives logits, and may have got the wanted rows only. Raises ``ValueError``
        for other rows.
        """
        if self._current is None:
            return []
        kept = is_head and rows == len(self._kept)
        owners = self._kept if kept else self._current
        if rows != len(owners):
            raise ValueError("a module with an adapter got other rows than those of its step")
        if kept not in self._groups:
            of_each = ((one, np.flatnonzero(owners == number)) for number, one in enumerate(self._adapters))
            self._groups[kept] = [(one, put(found, self._device)) for one, found in of_each if len(found)]
        return self._groups[kept]

    @contextmanager
    def _called_with(self, owners: Owners) -> Iterator[None]:
        before, groups = self._current, self._groups
        self._current, self._groups = owners, {}
        self._tell()
        try:
            yield
        finally:
            self._current, self._groups = before, groups
            self._tell()

    def _tell(self) -> None:
        if self._tables is not None:
            self._tables.set(self._adapters, self._current)
