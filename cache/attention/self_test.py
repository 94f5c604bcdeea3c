"""The self-test of attention backends: made-up steps whose results are compared with a float32 reference. It runs once
for each signature, before the backend is used for it.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from cache.attention.backend import Backend, Plan, Signature
from cache.error_line import first_line
from cache.memory.memory_tier import MemoryTier, PageShape
from cache.pages.layers import AttentionLayer, Reach, ScoreOptions
from cache.pages.packed import PackedStep
from cache.pages.pool import Page
from cache.pages.session import SessionCache

log = logging.getLogger("warmturn.engine")

LAYERS = (
    AttentionLayer(Reach.FULL, None, True),
    AttentionLayer(Reach.SLIDING, 18, True),
    AttentionLayer(Reach.CHUNKED, 24, True),
)
SESSIONS = (  # tokens cached, tokens new of each session of a step
    ((300, 1), (0, 1), (77, 1)),
    ((300, 1), (20, 3), (0, 90), (150, 40)),
    tuple((9 * n, 1) for n in range(70)),
)
_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the largest output
_PAGE = 16


class StepSpec(NamedTuple):
    """A step of the self-test: tokens cached and new of each session, and whether some tokens are hidden."""

    sessions: Sequence[tuple[int, int]]
    hidden: bool


def all_steps(signature: Signature) -> Iterator[StepSpec]:
    return (StepSpec(sessions, hidden) for sessions in SESSIONS for hidden in (False, True))


class SelfTest:
    """Whether ``backend`` agrees with the reference; the result for each signature is remembered."""

    def __init__(
        self,
        backend: Backend[Any],
        name: str,
        device: torch.device,
        steps: Callable[[Signature], Iterable[StepSpec]] = all_steps,
        plan: Callable[[PackedStep, AttentionLayer], Plan | None] | None = None,
    ) -> None:
        """``name``: of the backend in log lines. ``steps``: the steps to test for a signature. ``plan``: for all spans
        of a step; the backend's own as the last one if not given.
        """
        self._backend, self._name, self._device, self._steps = backend, name, device, steps
        self._plan = plan or (lambda step, layer: backend.plan(step, layer, step.numbers, True))
        self._passed: dict[Signature, bool] = {}

    def passes(self, signature: Signature) -> bool:
        """Whether the backend's results are right for this signature. A failure is logged once."""
        passed = self._passed.get(signature)
        if passed is None:
            passed = self._passed[signature] = self._run(signature)
        return passed

    def _run(self, signature: Signature) -> bool:
        shape = signature.shape
        random = torch.Generator().manual_seed(0)
        try:
            right = all(self._right(spec, signature, random) for spec in self._steps(signature))
        except Exception as error:  # whatever a compiler or a launch raises
            log.info("%s does not run for %s: torch is used: %s", self._name, shape, first_line(error, 160))
            return False
        if not right:
            log.info("%s gives wrong results for %s: torch is used", self._name, shape)
        return right

    def _right(self, spec: StepSpec, signature: Signature, random: torch.Generator) -> bool:
        shape, heads, device = signature.shape, signature.heads, self._device
        step = random_step(spec, device, shape, random)
        query = torch.randn(heads, step.tokens, shape.key_dim, generator=random).to(device, shape.dtype)
        sinks = torch.randn(heads, generator=random).to(device) if signature.sinks else None
        scores = ScoreOptions(shape.key_dim**-0.5, 3.0 if signature.capped else None, sinks)
        for layer in LAYERS:
            if (layer.reach is Reach.CHUNKED) is not signature.chunked:
                continue
            out = query.new_full((step.tokens, heads, shape.value_dim), float("nan"))
            plan = self._plan(step, layer)
            if plan is None:
                return False
            self._backend.attend(plan, step, layer, 0, query, scores, out)
            want = reference(step, layer, query.float(), scores)
            if not (out.float() - want).abs().max() <= _BOUNDS[shape.dtype] * want.abs().max():
                return False
        return True


def random_step(spec: StepSpec, device: torch.device, shape: PageShape, random: torch.Generator) -> PackedStep:
    """A step of sessions over random pages of one layer; memory that no session owns is NaN."""
    pages = [-(-(cached + new) // _PAGE) for cached, new in spec.sessions]
    tier = MemoryTier(sum(pages) + 2, _PAGE, device, {0: shape})
    slots = torch.randperm(tier.slots, generator=random).tolist()
    sessions = []
    for (cached, new), count in zip(spec.sessions, pages, strict=True):
        session = SessionCache("", None)
        session.token_ids = array("i", bytes(4 * (cached + new)))
        session.on_fed(cached)
        if spec.hidden:
            session.hide(cached // 3, cached // 2)
        session.pages = [Page(tier, slots.pop()) for _ in range(count)]
        sessions.append((session, new))
    pairs = ((tier.keys[0], shape.key, shape.key_dim), (tier.values[0], shape.value, shape.value_dim))
    for pool, record, dim in pairs[: 1 if shape.joined else 2]:
        pool.fill_(float("nan") if record is None else 255)  # bytes of 255 are NaN
        for session, new in sessions:
            rows = torch.randn(session.length + new, shape.key_heads, dim, generator=random).to(device, shape.dtype)
            stored = rows if record is None else record.pack(rows)
            for at, slot in enumerate(session.slots.tolist()):
                there = stored[at * _PAGE : (at + 1) * _PAGE]
                pool[slot, : len(there)] = there
    return PackedStep(sessions, tier)


def reference(step: PackedStep, layer: AttentionLayer, query: torch.Tensor, scores: ScoreOptions) -> torch.Tensor:
    """The reference, span by span: attention of float32 ``query [H, T, D]`` over layer 0; returns ``[T, H, Dv]``
    float32.
    """
    out = []
    for number, span in enumerate(step.spans):
        keys, values = (part.float()[: span.stop] for part in step.tier.read(0, step.pages(span, LAYERS[0])))
        groups = query.shape[0] // keys.shape[1]
        rows = query[:, span.row : span.row + span.size]
        logits = torch.einsum("hqd,khd->hqk", rows, keys.repeat_interleave(groups, 1)) * scores.scale
        if scores.softcap is not None:
            logits = scores.softcap * torch.tanh(logits / scores.softcap)
        seen = step.mask(number, layer, 0)
        if seen is not None:
            logits = logits.masked_fill(~seen, float("-inf"))
        if scores.sinks is not None:
            logits = torch.cat([logits, scores.sinks.reshape(-1, 1, 1).expand(-1, span.size, 1)], -1)
        weights = torch.softmax(logits, -1)[..., : span.stop]
        out.append(torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(groups, 1)))
    return torch.cat(out)
