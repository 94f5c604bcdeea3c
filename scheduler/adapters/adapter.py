"""``Adapter``: an adapter that was fitted to a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cache.pages.timeline_key import TimelineKey
from scheduler.adapters.checkpoint import LowRankPair
from scheduler.model_facts import AdapterFacts


class Adapter(TimelineKey):
    """The pairs of an adapter by the modules that they add to, as these compute. It is the key of the timelines that
    are computed with it.
    """

    def __init__(self, name: str, digest: str, pairs: Mapping[torch.nn.Module, LowRankPair]) -> None:
        super().__init__(digest)
        self.name = name
        self.digest = digest
        self.pairs = dict(pairs)

    @property
    def rank(self) -> int:
        """The highest rank."""
        return max(pair.rank for pair in self.pairs.values())

    @property
    def facts(self) -> AdapterFacts:
        """What is told of it."""
        nbytes = sum(pair.down.nbytes + pair.up.nbytes for pair in self.pairs.values())
        return AdapterFacts(self.name, self.rank, len(self.pairs), nbytes, self.digest)

    def add(self, module: torch.nn.Module, rows: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add to the rows ``rows [n]`` of a module's result ``out [T, out]`` what it adds for the input ``x [T,
        in]``.
        """
        pair = self.pairs.get(module)
        if pair is None:
            return
        given = x if len(rows) == len(x) else x.index_select(0, rows)
        low = torch.nn.functional.linear(given, pair.down.to(x.dtype))
        added = torch.nn.functional.linear(low * pair.scale, pair.up.to(x.dtype))
        if len(rows) == len(x):
            out += added
        else:
            out.index_add_(0, rows, added.to(out.dtype))
