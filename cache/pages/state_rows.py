"""``StateRows``: the states of several sessions as rows of one batch.

A step computes the next tokens of all sessions that feed one in a batch. Their states are not copied for it: a session
that decodes holds a row, and the tensors of its ``state`` are views of that row. Sessions keep their rows from step to
step, whatever their order in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cache.pages import state as states
from cache.pages.session import SessionCache
from cache.pages.state import TensorPlace


class _Holder(NamedTuple):
    """Who holds a row, the state that it was given there, and where that keeps its tensors."""

    session: weakref.ref[SessionCache]
    state: Any
    places: list[TensorPlace]


class _Part(NamedTuple):
    """The first rows of the batch as one state, and where that keeps its tensors."""

    state: Any
    places: list[TensorPlace]


class StateRows:
    """The rows of one model on one device."""

    def __init__(self) -> None:
        self._batch: Any = None  # a state whose tensors have all rows
        self._facts: dict[str, Any] = {}  # of each state
        self._holders: list[_Holder | None] = []
        self._parts: dict[int, _Part] = {}  # by the number of rows
        self._right: set[int] = set()  # parts with which a step has changed no Python values
        self._fixed = False
        self.refused = False  # what computes with rows leaves results that are no rows

    def reserve(self, state: Any, count: int) -> None:
        """Make ``count`` rows for states like ``state``; from now on their addresses stay."""
        self._allocate(state, count)
        self._fixed = True

    def bind(self, sessions: Sequence[SessionCache], count: int = 0) -> list[int] | None:
        """Give each of ``sessions`` one of the first rows, of which there are as many as sessions. Returns their rows,
        or None where their states cannot be rows. Nobody else holds one of the first ``count`` rows then.
        """
        wanted = len(sessions)
        if self.refused or not wanted or any(session.state is None for session in sessions):
            return None
        if max(count, wanted) > len(self._holders):
            if self._fixed:
                return None
            self._allocate(sessions[0].state, max(count, wanted, 2 * len(self._holders)))
        held = {id(self._holder(row)): row for row in range(wanted)}
        rows = [held.get(id(session), -1) for session in sessions]
        if not all(self._fits(s.state) for s, row in zip(sessions, rows, strict=True) if row < 0):
            return None
        free = sorted(set(range(wanted)) - set(rows))
        for row in (*free, *range(wanted, count)):
            self._release(row)
        unused = iter(free)
        for at, session in enumerate(sessions):
            if rows[at] < 0:
                rows[at] = next(unused)
                self._take(rows[at], session)
        return rows

    def first(self, count: int) -> Any:
        """The first ``count`` rows as one state, of tensors ``[count, ...]``. Call ``settle`` after a step has changed
        or replaced them.
        """
        return self._part(count).state

    def settle(self, count: int) -> None:
        """Bring the results of a step with ``first(count)`` that are in other tensors back to the rows. Where they are
        of other shapes, or Python values have changed, give the sessions their results and refuse from now on.
        """
        part = self._part(count)
        if states.take_back(part.places) and self._proven(count, part):
            return
        self.refused = True
        for row in range(count):
            session = self._holder(row)
            if session is not None:
                session.state = states.part_of(part.state, row)
        self._batch, self._holders, self._parts = None, [], {}

    def _proven(self, count: int, part: _Part) -> bool:
        """Whether a step changes no Python values. What counts tokens changes at the first one."""
        if count not in self._right and states.facts_of(part.state) != self._facts:
            return False
        self._right.add(count)
        return True

    def _holder(self, row: int) -> SessionCache | None:
        """The session whose state is in ``row``, if there is one."""
        holder = self._holders[row]
        session = holder.session() if holder is not None else None
        if holder is None or session is None or session.state is not holder.state:
            return None
        return session if all(place.unchanged for place in holder.places) else None

    def _release(self, row: int) -> None:
        """Whoever has tensors in ``row`` gets copies of them."""
        holder, self._holders[row] = self._holders[row], None
        session = holder.session() if holder is not None else None
        if holder is None or session is None or session.state is None:
            return
        ours = {id(place.tensor) for place in holder.places}
        if any(id(place.tensor) in ours for place in states.places_of(session.state)):
            session.state = states.clone(session.state)

    def _take(self, row: int, session: SessionCache) -> None:
        with torch.inference_mode(False), torch.no_grad():
            view = states.combine(lambda tensors: tensors[0][row : row + 1], [self._batch])
            for to, source in zip(states.places_of(view), states.places_of(session.state), strict=True):
                to.tensor.copy_(source.tensor)
        for before, holder in enumerate(self._holders):
            if holder is not None and holder.session() is session:
                self._holders[before] = None  # it had another row
        session.state = view
        self._holders[row] = _Holder(weakref.ref(session), view, states.places_of(view))

    def _fits(self, state: Any) -> bool:
        """Whether a state can be a row of the batch."""
        found, batch = states.tensors_of(state), states.tensors_of(self._batch)
        return (
            found.keys() == batch.keys()
            and states.facts_of(state) == self._facts
            and all(
                tensor.dtype is batch[path].dtype and tensor.dim() > 0 and tensor.shape == (1, *batch[path].shape[1:])
                for path, tensor in found.items()
            )
        )

    def _allocate(self, state: Any, count: int) -> None:
        """New rows; who holds an old one gets a copy of its state."""
        for row in range(len(self._holders)):
            self._release(row)
        with torch.inference_mode(False), torch.no_grad():
            self._batch = states.combine(lambda tensors: tensors[0].new_zeros(count, *tensors[0].shape[1:]), [state])
        self._facts = states.facts_of(state)
        self._holders, self._parts, self._right = [None] * count, {}, set()

    def _part(self, count: int) -> _Part:
        if count not in self._parts:
            with torch.inference_mode(False), torch.no_grad():
                part = states.combine(lambda tensors: tensors[0][:count], [self._batch])
            self._parts[count] = _Part(part, states.places_of(part))
        return self._parts[count]
