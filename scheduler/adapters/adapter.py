"""``Adapter``: an adapter that was fitted to a model."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from cache.pages.timeline_key import TimelineKey
from scheduler.adapters.adapter_checkpoint import LowRankPair
from scheduler.model_facts import AdapterFacts

Module = torch.nn.Module


@dataclass
class Changes:
    """What an adapter changes by module, as it computes: the result ``y`` of a module for ``x`` becomes
    ``scales[module] * y + pair(x) + shifts[module]``, or what the module of ``copies`` gives. Scales and shifts are
    ``[out]``.
    """

    pairs: dict[Module, LowRankPair] = field(default_factory=dict)
    scales: dict[Module, torch.Tensor] = field(default_factory=dict)
    shifts: dict[Module, torch.Tensor] = field(default_factory=dict)
    copies: dict[Module, Module] = field(default_factory=dict)

    @property
    def modules(self) -> list[Module]:
        return [*dict.fromkeys([*self.pairs, *self.scales, *self.shifts, *self.copies])]

    @property
    def nbytes(self) -> int:
        halves = [half for pair in self.pairs.values() for half in (pair.down, pair.up)]
        weights = [weight for copy in self.copies.values() for weight in copy.parameters()]
        return sum(each.nbytes for each in (*halves, *self.scales.values(), *self.shifts.values(), *weights))


class Adapter:
    """The changes of an adapter. ``invocation``: the token ids from which on it is active, at the last place where a
    prompt has them; empty: it is active for all tokens. ``late``: it changes nothing before all KV of a token is made.
    """

    def __init__(
        self, name: str, digest: str, changes: Changes, invocation: tuple[int, ...] = (), late: bool = False
    ) -> None:
        self.name = name
        self.digest = digest
        self.changes = changes
        self.invocation = invocation
        self.late = late

    @property
    def pairs(self) -> Mapping[Module, LowRankPair]:
        """The low-rank pairs by the modules that they add to."""
        return self.changes.pairs

    @property
    def only_adds(self) -> bool:
        """Whether it adds low-rank products and nothing else: programs do that themselves."""
        return not (self.changes.scales or self.changes.shifts or self.changes.copies)

    @property
    def rank(self) -> int:
        """The highest rank."""
        return max((pair.rank for pair in self.pairs.values()), default=0)

    @property
    def facts(self) -> AdapterFacts:
        changes = self.changes
        return AdapterFacts(self.name, self.rank, len(changes.modules), changes.nbytes, self.digest, self.invocation)

    def use(self, ids: array[int]) -> AdapterUse | None:
        """How it is used on a prompt; None: it is not active there."""
        if not self.invocation:
            return AdapterUse(self, 0)
        size, asked = len(self.invocation), array("i", self.invocation)
        places = range(len(ids) - size, -1, -1)
        begin = next((at for at in places if ids[at] == asked[0] and ids[at : at + size] == asked), None)
        return None if begin is None else AdapterUse(self, begin)

    def change(self, module: Module, rows: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        """Make of the rows ``rows [n]`` of a module's result ``out [T, out]`` for the input ``x [T, in]`` (``[T]`` for
        token ids) what they are with it.
        """
        changes, pair = self.changes, self.pairs.get(module)
        whole = len(rows) == len(x)
        given = x if whole else x.index_select(0, rows)
        if (copy := changes.copies.get(module)) is not None:
            out.index_copy_(0, rows, copy(given).to(out.dtype))
            return
        if (scale := changes.scales.get(module)) is not None:
            out.index_copy_(0, rows, out.index_select(0, rows) * scale)
        if pair is not None:
            low = torch.nn.functional.linear(given, pair.down.to(x.dtype))
            added = torch.nn.functional.linear(low * pair.scale, pair.up.to(x.dtype)).to(out.dtype)
            out.add_(added) if whole else out.index_add_(0, rows, added)
        if (shift := changes.shifts.get(module)) is not None:
            out.index_add_(0, rows, shift.to(out.dtype).expand(len(rows), -1))


class AdapterUse(TimelineKey):
    """An adapter from position ``active`` of a timeline on: the key of the timelines that are computed so. What is
    before, and all of a ``late`` adapter's, has the KV of the model alone.
    """

    def __init__(self, adapter: Adapter, active: int) -> None:
        super().__init__(adapter.digest, None if adapter.late else active)
        self.adapter = adapter
        self.active = active
