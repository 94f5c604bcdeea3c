"""Doubles of what only a GPU has, by definition: they know no more than they are told, so what is told is tested."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from cache.attention import packed_attention
from cache.attention.backend import Signature
from cache.attention.triton import TritonBackend, TritonPlan
from cache.memory.memory_tier import MemoryTier, divide
from cache.pages.layers import AttentionLayer, ScoreOptions
from cache.pages.packed import PackedStep
from cache.pages.pool import Page
from scheduler.model.cuda_capture import Step


class TritonDouble:
    """``TritonBackend``, query by query: tables, work lists, positions and flags of a plan are all that it looks at."""

    def __init__(self, programs: int = 3) -> None:
        self.programs = programs  # for each key head
        self.calls = 0

    def fits(self, signature: Signature) -> bool:
        return True

    def plan(self, step: PackedStep, layer: AttentionLayer, spans: frozenset[int], last: bool) -> TritonPlan | None:
        return TritonBackend.plan(cast(TritonBackend, self), step, layer, spans, last)

    def attend(
        self,
        plan: TritonPlan,
        step: PackedStep,
        layer: AttentionLayer,
        source: int,
        query: torch.Tensor,
        scores: ScoreOptions,
        out: torch.Tensor,
    ) -> None:
        """What kernels/paged.py says that it does. No launch is an operation of torch's."""
        with _disable_current_modes():
            self._attend(plan, plan.tables[step.is_near(layer)], layer, step.tier, source, query, scores, out)

    def _attend(
        self,
        plan: TritonPlan,
        table: torch.Tensor,
        layer: AttentionLayer,
        tier: MemoryTier,
        source: int,
        query: torch.Tensor,
        scores: ScoreOptions,
        out: torch.Tensor,
    ) -> None:
        self.calls += 1
        heads, key_heads = query.shape[0], tier.keys[source].shape[2]
        group = heads // key_heads
        least = 1 << (group - 1).bit_length()
        for launch in plan.launches(layer, group, [max(least, 4), max(least, 16)], self.programs, 8):
            items = launch.work[: launch.items * 6].view(-1, 6).tolist()
            merges = launch.work[launch.items * 6 :].view(-1, 3).tolist()
            parts: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
            for span, row, tokens, begin, end, part in items:
                assert tokens <= launch.tokens
                for token in range(tokens):
                    seen, position = torch.arange(begin, end), int(plan.positions[row]) + token
                    seen = seen[(seen >= layer.first_key(position)) & (seen <= position)]
                    slots = table[span, seen // tier.page_size].long()
                    if plan.flags is not None:
                        flagged = seen < plan.flags.shape[1]
                        shown = plan.flags[span, seen.clamp(max=plan.flags.shape[1] - 1)] != 0
                        seen, slots = seen[shown | ~flagged], slots[shown | ~flagged]
                    keys = tier.keys[source][slots, seen % tier.page_size]
                    values = tier.values[source][slots, seen % tier.page_size]
                    if part < 0:
                        out[row + token] = one(query[:, row + token], keys, values, scores)[0]
                    else:
                        bare = scores._replace(sinks=None)
                        assert part + token not in parts
                        assert part + token < launch.items * launch.tokens
                        parts[part + token] = [one(query[:, row + token], keys, values, bare)]
            for row, first, count in merges:
                if row >= 0:
                    mine = [parts.pop(first + n * launch.tokens)[0] for n in range(count)]
                    out[row] = together(mine, scores.sinks).to(out.dtype)
            assert not parts


def near_step(step: PackedStep, layer: AttentionLayer) -> PackedStep:
    """``step`` of layer 0 over pages in two parts: ``layer`` 0 is their near part, and sessions hold of it only what
    they see. All other memory is NaN.
    """
    old, size = step.tier, step.tier.page_size
    shapes = {0: old.shapes[0], 1: old.shapes[0]}
    tier = MemoryTier(2 * old.slots, size, old.device, shapes, division=divide(shapes, {0}, size))
    assert tier.near_layers
    for pool in tier.pools.values():
        pool.fill_(float("nan") if pool.is_floating_point() else 255)
    for span in step.spans:
        slots, session = span.session.slots.tolist(), span.session
        tier.alloc(near=True)  # slots of the two parts are different numbers
        first = layer.first_key(span.start) // size
        session.pages = [
            Page(tier, tier.alloc(), tier.alloc(near=True) if at >= first else -1) for at in range(len(slots))
        ]
        session.on_pages_moved()
        for at in range(first, len(slots)):
            for mine, theirs in ((tier.keys[0], old.keys[0]), (tier.values[0], old.values[0])):
                mine[session.pages[at].near] = theirs[slots[at]]
    return PackedStep([(span.session, span.size) for span in step.spans], tier)


def together(parts: list[tuple[torch.Tensor, torch.Tensor]], sinks: torch.Tensor | None) -> torch.Tensor:
    """Attention over several parts of the keys, from each part's output and the log of the sum of its weights."""
    sums = torch.stack([lse for _, lse in parts])
    whole = torch.logsumexp(sums if sinks is None else torch.cat([sums, sinks.float()[None]]), 0)
    return sum((torch.exp(lse - whole)[:, None] * found.float() for found, lse in parts), torch.zeros(()))


class Capture:
    """A capture on the CPU. ``made`` gets the step and returns what runs it again; without it the step runs anew."""

    def __init__(self, made: Callable[[Step], Callable[[], Any]] = lambda step: step) -> None:
        self._made = made

    def watched(self) -> AbstractContextManager[None]:
        return nullcontext()

    def __call__(self, step: Step) -> Callable[[], Any]:
        return self._made(step)


class Aux(NamedTuple):
    """torch's ``AuxRequest``."""

    lse: bool = False


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch 2.11's, as it is documented; queries and keys are aligned at their ends."""
    assert cu_seq_q.dtype is cu_seq_k.dtype is torch.int32
    out, sums = torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    queries, keys = cu_seq_q.tolist(), cu_seq_k.tolist()
    assert max(b - a for a, b in pairwise(queries)) == max_q
    assert max(b - a for a, b in pairwise(keys)) == max_k
    for (a, b), (c, d) in zip(pairwise(queries), pairwise(keys), strict=True):
        for row in range(a, b):
            last = d - (b - row)
            left = c if window_size[0] < 0 else max(c, last - window_size[0])
            right = d if window_size[1] < 0 else min(d, last + window_size[1] + 1)
            scores = ScoreOptions(float(scale or 1.0), None, None)
            out[row], sums[:, row] = one(query[row], key[left:right], value[left:right], scores)
    return out, sums


def one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: ScoreOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query ``[H, D]`` over ``[keys, Hk, D]``: the output ``[H, Dv]`` and the log of the sum of the weights."""
    groups = query.shape[0] // keys.shape[1]
    logits = torch.einsum("hd,khd->hk", query.float(), keys.float().repeat_interleave(groups, 1)) * scores.scale
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    if scores.sinks is not None:
        logits = torch.cat([logits, scores.sinks.float()[:, None]], 1)
    weights = torch.softmax(logits, 1)[:, : keys.shape[0]]
    found = torch.einsum("hk,khd->hd", weights, values.float().repeat_interleave(groups, 1))
    return found.to(query.dtype), torch.logsumexp(logits, 1)


def use_double(monkeypatch: pytest.MonkeyPatch, mode: Any) -> None:
    """Attention of that mode runs as on a GPU, by a ``TritonDouble``."""
    double = TritonDouble()
    monkeypatch.setattr(packed_attention, "backends", lambda device: [double])
    if mode.name == "packed":
        monkeypatch.setattr(mode.attention, "_backends", {})


class CountingBackend:
    """A backend of torch's compiler that counts: graphs, and runs of them. They run as they are, unless ``compile``
    makes something of a graph and its inputs.
    """

    def __init__(self, compile: Callable[[Any, Any], Any] = lambda graph, inputs: graph) -> None:
        self.graphs = self.ran = 0
        self._compile = compile

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        made = self._compile(graph, inputs)

        def run(*args: Any) -> Any:
            self.ran += 1
            return made(*args)

        return run
