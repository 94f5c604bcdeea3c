"""A model as the engine runs it, step by step, and steps of several sessions for it."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from cache.memory.memory_tier import MemoryTier
from cache.pages.layers import read_layers
from cache.pages.pool import PagePool
from cache.pages.session import SessionCache
from cache.store import SessionStore
from scheduler.accel.cpu.experts import pack_experts
from scheduler.accel.cpu.fusion import Fusion
from scheduler.accel.cpu.linear import pack
from scheduler.forward.mode import Mode
from scheduler.forward.modes import PackedMode
from scheduler.forward.rope import LongRope
from scheduler.model.measurement import make_session
from scheduler.model.probe import probe
from scheduler.model.runner import ModelRunner
from scheduler.model.verdict import Verdict

PAGE = 4


class Stage:
    """A model as the engine runs it, step by step."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layers = read_layers(model.config.get_text_config(decoder=True))
        self.rope = LongRope(model)
        packing = pack(model)
        pack_experts(model, packing)
        self.verdict: Verdict = probe(model, self.layers, PAGE, self.rope, packing=packing)

    @property
    def mode(self) -> Mode:
        return self.verdict.mode

    @property
    def fused(self) -> Counter[str]:
        """The classes of the modules that run as programs."""
        assert isinstance(self.mode, PackedMode)
        found = self.mode.fusion._fused if self.mode.fusion is not None else []
        return Counter(type(fused.module).__name__ for fused in found)

    @property
    def chains(self) -> list[int]:
        """How many layers are computed in one call, each time."""
        assert isinstance(self.mode, PackedMode)
        found = self.mode.fusion._fused if self.mode.fusion is not None else []
        return [1 + len(fused._behind) for fused in found if fused._chain is not None]

    @property
    def fusion(self) -> Fusion:
        """What makes modules run as programs."""
        assert isinstance(self.mode, PackedMode)
        assert self.mode.fusion is not None
        return self.mode.fusion

    def run(
        self, timelines: list[list[int]], steps: list[list[tuple[int, int]]], last: bool = False
    ) -> list[torch.Tensor]:
        """The logits of every timeline; a step is (which, how many tokens) each. ``last``: of its last token each."""
        slots = sum(-(-len(ids) // PAGE) for ids in timelines)
        tier = MemoryTier(slots, PAGE, torch.device("cpu"))
        pool = PagePool(tier, MemoryTier(0, PAGE, torch.device("cpu")))
        store = SessionStore(pool, 0 if self.mode.stateful else None, self.rope.threshold)
        runner = ModelRunner(self.mode, tier, self.rope)
        sessions: list[SessionCache] = []
        for ids in timelines:
            session = make_session(array("i", ids), None)
            session.stateful = self.mode.stateful
            session.warm = session.running = True
            store.reserve(session, len(ids))
            sessions.append(session)
        got: list[list[torch.Tensor]] = [[] for _ in timelines]
        for step in steps:
            counts = [count for _, count in step]
            rows = [end - 1 for end in accumulate(counts)] if last else range(sum(counts))
            out = runner.run([(sessions[i], count) for i, count in step], rows)
            for (i, _), part in zip(step, torch.split(out, [1] * len(step) if last else counts), strict=True):
                got[i].append(part)
        return [torch.cat(parts) for parts in got]


LONG = [list(range(20, 20 + n)) for n in (97, 41, 12)]
STEPS = [
    [(0, 50), (1, 33)],  # more than the compiled attention takes at once
    [(2, 9), (0, 1)],
    [(1, 7), (0, 40), (2, 1)],
    [(0, 5), (1, 1), (2, 1)],
    [(2, 1)],
    [(0, 1)],
]
SHORT = [[(0, 3)], [(0, 1)], [(0, 30), (1, 30), (2, 10)], [(0, 1)], [(0, 30), (1, 11)], [(2, 2), (0, 3)], [(0, 29)]]
DECODE = [[(0, 4), (1, 3), (2, 2)], *[[(0, 1), (2, 1), (1, 1)]] * 4, *[[(1, 1), (0, 1)]] * 4]


def same(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """Whether logits of first tokens are those of a forward from scratch, up to rounding."""
    return all(
        float((one - other[: len(one)]).abs().max()) <= 1e-4 * float(other.abs().max())
        and torch.equal(one.argmax(-1), other[: len(one)].argmax(-1))
        for one, other in zip(got, want, strict=True)
    )
