"""Who attends to which segments of a step on a GPU: the kernel over pages, torch's flash kernels, or nobody here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cache.attention import paged, varlen
from cache.pages.layers import AttentionLayer, ScoreOptions
from cache.pages.packed import PackedStep


def attend(
    step: PackedStep, layer: AttentionLayer, source: int, query: torch.Tensor, scores: ScoreOptions, out: torch.Tensor
) -> frozenset[int]:
    """Fill rows of ``out [T, H, Dv]`` with the attention of ``query [H, T, D]`` over the pages of layer ``source``; the
    numbers of the segments that are done. None of them on a CPU.

    Long segments are torch's, where it computes what they ask for; the kernel has all others, or torch those too.
    """
    kernel, flash = paged.kernel(query.device), varlen.varlen(query.device)
    about = (step.tier.shapes[source], query.shape[0], query.shape[2], query.dtype, scores, layer)
    if kernel is not None and not kernel.fits(*about):
        kernel = None
    if flash is not None and not flash.fits(*about):
        flash = None
    every, seen, long = _kept(step, "kinds", lambda: _kinds(step))
    theirs = frozenset[int]() if flash is None else long if kernel is not None else seen
    if flash is not None and theirs:
        plan = _kept(step, (layer.kind, theirs), lambda: varlen.Plan(step, layer, theirs))
        flash.attend(plan, step, source, query, scores, out)
    ours = every - theirs if theirs else every
    if kernel is not None and ours:
        plan = _kept(step, ours, lambda: paged.plan(step, ours))
        kernel.attend(plan, layer, step.tier, source, query, scores, out)
    return theirs if kernel is None else every


def _kinds(step: PackedStep) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
    """All segments, those that see all their tokens, the long ones of these."""
    seen = [number for number, segment in enumerate(step.segments) if not segment.session.hidden]
    long = [number for number in seen if step.segments[number].size >= varlen.LONG]
    return frozenset(range(len(step.segments))), frozenset(seen), frozenset(long)


def _kept(step: PackedStep, kind: Any, made: Callable[[], Any]) -> Any:
    """A plan, made once a step."""
    if kind not in step.plans:
        step.plans[kind] = made()
    return step.plans[kind]
