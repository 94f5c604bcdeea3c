"""``ModelRunner``: runs a step on the model and returns its logits. While serving, nothing else calls the model or
advances the length of a session cache.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate

import numpy as np
import torch

from cache.memory.memory_tier import MemoryTier
from cache.memory.stream import put
from cache.pages.packed import PackedStep
from cache.pages.session import SessionCache
from scheduler.adapters.adapter_set import AdapterSet
from scheduler.forward.mode import Mode
from scheduler.forward.rope import LongRope
from scheduler.model.decode_graphs import DecodeGraphs
from scheduler.model.head_input import HeadInput
from scheduler.parallel.followers import Followers


class ModelRunner:
    """Runs steps in one mode over the pages of one device tier."""

    def __init__(
        self,
        mode: Mode,
        tier: MemoryTier,
        rope: LongRope | None = None,
        graphs: DecodeGraphs | None = None,
        followers: Followers | None = None,
        adapters: AdapterSet | None = None,
    ) -> None:
        self.mode = mode
        self.tier = tier
        self._rope = rope
        self._graphs = graphs
        self._followers = followers
        self.adapters = adapters
        self.state_size = 0  # of the latest run with states
        self._latest: PackedStep | None = None  # if the next one may follow it

    @property
    def overlaps(self) -> bool:
        """Whether ``run`` returns before the device is done: not where other ranks are waited for."""
        return self.tier.device.type != "cpu" and self._followers is None

    @torch.inference_mode()
    def run(
        self, work: Sequence[tuple[SessionCache, int]], rows: Sequence[int], *, states: bool = False
    ) -> torch.Tensor:
        """Feed ``count`` tokens of each session; returns the logits ``[len(rows), V]`` float32 of the packed rows in
        ``rows``. With ``states`` each row's logits are followed by the ``state_size`` numbers that the output head has
        read.

        The sessions' pages must be reserved. Lengths advance only if the forward succeeds. Without rows: ``[0, V]``.
        """
        parts = self._parts(work, states)
        logits = self._forward_parts(work, rows, states, parts) if parts else self._forward(work, rows, states)
        for session, count in work:
            session.on_fed(count)
        return logits

    def _forward(self, work: Sequence[tuple[SessionCache, int]], rows: Sequence[int], states: bool) -> torch.Tensor:
        plain = not states and list(rows) == list(range(len(work)))  # graphs give the logits of each token only
        graphs = self._graphs if plain else None
        logits = graphs.run(work) if graphs is not None else None
        if logits is None:
            logits = self._run_packed(work, list(rows) or [0], states)
            if graphs is not None:
                graphs.learn(work)
        return logits.float()[: len(rows)]

    def _run_packed(self, work: Sequence[tuple[SessionCache, int]], rows: list[int], states: bool) -> torch.Tensor:
        """The step without graphs, on all ranks."""
        with (
            self._followers.step(self.mode, work, rows) if self._followers is not None else nullcontext(),
            self._rope.side(work[0][0].long) if self._rope is not None else nullcontext(),
        ):
            step, keep = self._step_of(work), put(np.array(rows), self.tier.device)
            try:
                if not states:
                    return self._run_step(step, rows, keep)
                with HeadInput(self.mode.model) as read:
                    logits = self._run_step(step, rows, keep)
                found = read.of(keep, step.tokens)
            finally:
                self._latest = step if step.release() else None
            self.state_size = found.shape[1]
            return torch.cat([logits.float(), found], dim=1)

    def _step_of(self, work: Sequence[tuple[SessionCache, int]]) -> PackedStep:
        """The layout of a step: that of the one before, where it can follow it, as both decode the same sessions."""
        step = self._latest
        return step if step is not None and step.follow(work) else PackedStep(work, self.tier)

    def _run_step(self, step: PackedStep, rows: list[int], keep: torch.Tensor) -> torch.Tensor:
        """The forward, with the adapters of the step's sessions."""
        if all(span.session.key is None for span in step.spans):
            return self.mode.forward(step, keep)
        assert self.adapters is not None
        with self.adapters.over(step, rows) as programs, self.mode.uncompiled(programs=programs):
            return self.mode.forward(step, keep)

    def _parts(self, work: Sequence[tuple[SessionCache, int]], states: bool) -> list[list[int]]:
        """The numbers of the sessions of each forward, where there are several: of those on one side of a RoPE
        threshold, or of those that decode beside prompts, whose step is a graph.
        """
        if len({session.long for session, _ in work}) > 1:
            return [[at for at, (session, _) in enumerate(work) if session.long is long] for long in (False, True)]
        return [] if self._graphs is None or states else self._graphs.parts(work)

    def _forward_parts(
        self, work: Sequence[tuple[SessionCache, int]], rows: Sequence[int], states: bool, parts: list[list[int]]
    ) -> torch.Tensor:
        """A forward for each of ``parts``; the logits in the order of ``rows``."""
        ends = [*accumulate(count for _, count in work)]
        owners = [bisect_right(ends, row) for row in rows]
        found: list[torch.Tensor] = []
        order: list[int] = []  # of the logits that are found
        for part in parts:
            firsts = dict(zip(part, accumulate((work[at][1] for at in part), initial=0), strict=False))
            wanted = [at for at, owner in enumerate(owners) if owner in firsts]
            packed = [rows[at] - (ends[owners[at]] - work[owners[at]][1]) + firsts[owners[at]] for at in wanted]
            found.append(self._forward([work[at] for at in part], packed, states))
            order += wanted
        places = np.argsort(np.array(order, np.int64))
        return torch.cat(found).index_select(0, put(places, self.tier.device))
