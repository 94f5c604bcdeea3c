"""``ModelRunner``: runs a step on the model and returns its logits. While serving, nothing else calls the model or
advances the length of a session cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

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
        sides = {session.long for session, _ in work}
        forward = self._forward if len(sides) == 1 else self._forward_split
        logits = forward(work, rows, states)
        for session, count in work:
            session.on_fed(count)
        return logits

    def _forward(self, work: Sequence[tuple[SessionCache, int]], rows: Sequence[int], states: bool) -> torch.Tensor:
        # Graphs know positions that are indices, no adapters, and give logits only.
        plain = not states and all(session.media is None and session.key is None for session, _ in work)
        graphs = self._graphs if plain and list(rows) == list(range(len(work))) else None
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
            step, keep = PackedStep(work, self.tier), put(np.array(rows), self.tier.device)
            if not states:
                return self._run_step(step, rows, keep)
            with HeadInput(self.mode.model) as read:
                logits = self._run_step(step, rows, keep)
            found = read.of(keep, step.tokens)
            self.state_size = found.shape[1]
            return torch.cat([logits.float(), found], dim=1)

    def _run_step(self, step: PackedStep, rows: list[int], keep: torch.Tensor) -> torch.Tensor:
        """The forward, with the adapters of the step's sessions."""
        if all(span.session.key is None for span in step.spans):
            return self.mode.forward(step, keep)
        assert self.adapters is not None
        with self.adapters.over(step, rows) as programs, self.mode.uncompiled(programs=programs):
            return self.mode.forward(step, keep)

    def _forward_split(
        self, work: Sequence[tuple[SessionCache, int]], rows: Sequence[int], states: bool
    ) -> torch.Tensor:
        """Sessions on the two sides of a RoPE threshold: a forward for each side, the logits in the order of
        ``rows``.
        """
        owner = [i for i, (_, count) in enumerate(work) for _ in range(count)]  # which session a row belongs to
        found: dict[int, torch.Tensor] = {}
        for long in (False, True):
            mine = [i for i, (session, _) in enumerate(work) if session.long is long]
            packed = [row for row in range(len(owner)) if owner[row] in mine]  # its rows, in their order
            wanted = [row for row in rows if owner[row] in mine]
            logits = self._forward([work[i] for i in mine], [packed.index(row) for row in wanted], states)
            found.update(zip(wanted, logits, strict=True))
        return torch.stack([found[row] for row in rows]) if rows else logits[:0]
