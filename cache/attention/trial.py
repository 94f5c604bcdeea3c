"""A way to attend on a device, compared with the definition before it is used there."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence

import torch

from cache.memory.tier import MemoryTier, PageShape
from cache.pages.layers import AttentionLayer, Reach, ScoreOptions
from cache.pages.packed import PackedStep
from cache.pages.pages import Page
from cache.pages.session import SessionCache

log = logging.getLogger("warmturn.engine")

Attend = Callable[[PackedStep, AttentionLayer, torch.Tensor, ScoreOptions, torch.Tensor], None]

LAYERS = (
    AttentionLayer(Reach.FULL, None, True),
    AttentionLayer(Reach.SLIDING, 18, True),
    AttentionLayer(Reach.CHUNKED, 24, True),
)
WORK = (  # tokens cached, tokens new of each session of a step
    ((300, 1), (0, 1), (77, 1)),
    ((300, 1), (20, 3), (0, 90), (150, 40)),
    tuple((9 * n, 1) for n in range(70)),
)
_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of the largest output
_PAGE = 16


def right(
    name: str,
    attend: Attend,
    device: torch.device,
    shape: PageShape,
    heads: int,
    capped: bool,
    sinks: bool,
    steps: Sequence[Sequence[tuple[int, int]]] = WORK,
    hidden: Sequence[bool] = (False, True),
    layers: Sequence[AttentionLayer] = LAYERS,
) -> bool:
    """Whether ``attend`` fills its output ``[T, H, Dv]`` with what queries ``[H, T, D]`` give over the pages of layer
    0, in ``steps`` (the sessions of each as in ``WORK``), with tokens ``hidden`` or not, in ``layers``. Where not, that
    is said in the log once.
    """
    random = torch.Generator().manual_seed(0)
    try:
        for work in steps:
            for hide in hidden:
                step = made_up(work, device, shape, hide, random)
                query = torch.randn(heads, step.tokens, shape.key_dim, generator=random).to(device, shape.dtype)
                aux = torch.randn(heads, generator=random).to(device) if sinks else None
                scores = ScoreOptions(shape.key_dim**-0.5, 3.0 if capped else None, aux)
                for layer in layers:
                    out = query.new_full((step.tokens, heads, shape.value_dim), float("nan"))
                    attend(step, layer, query, scores, out)
                    want = defined(step, layer, query.float(), scores)
                    if not (out.float() - want).abs().max() <= _BOUNDS[shape.dtype] * want.abs().max():
                        log.info("%s is not right for %s: torch's is used", name, shape)
                        return False
    except Exception as error:  # whatever a compiler or a launch raises
        log.info("%s does not run for %s: torch's is used: %s", name, shape, brief(error))
        return False
    return True


def brief(error: Exception) -> str:
    """The first line of an error."""
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__


def made_up(
    work: Sequence[tuple[int, int]], device: torch.device, shape: PageShape, hide: bool, random: torch.Generator
) -> PackedStep:
    """A step of sessions over random pages of one layer; what no session owns is NaN."""
    pages = [-(-(cached + new) // _PAGE) for cached, new in work]
    tier = MemoryTier(sum(pages) + 2, _PAGE, device, {0: shape})
    slots = torch.randperm(tier.slots, generator=random).tolist()
    sessions = []
    for (cached, new), count in zip(work, pages, strict=True):
        session = SessionCache("", None)
        session.token_ids = array("i", bytes(4 * (cached + new)))
        session.fed(cached)
        if hide:
            session.hide(cached // 3, cached // 2)
        session.pages = [Page(tier, slots.pop()) for _ in range(count)]
        sessions.append((session, new))
    for pool in (tier.keys[0], tier.values[0]):
        pool.fill_(float("nan"))
        for session, new in sessions:
            rows = torch.randn(session.length + new, *pool.shape[2:], generator=random).to(device, shape.dtype)
            for at, slot in enumerate(session.slots.tolist()):
                there = rows[at * _PAGE : (at + 1) * _PAGE]
                pool[slot, : len(there)] = there
    return PackedStep(sessions, tier)


def defined(step: PackedStep, layer: AttentionLayer, query: torch.Tensor, scores: ScoreOptions) -> torch.Tensor:
    """The definition, segment by segment: float32 ``query [H, T, D]`` over layer 0, ``[T, H, Dv]``."""
    out = []
    for number, segment in enumerate(step.segments):
        keys, values = (part.float()[: segment.stop] for part in step.tier.read(0, step.pages(segment, LAYERS[0])))
        groups = query.shape[0] // keys.shape[1]
        rows = query[:, segment.row : segment.row + segment.size]
        logits = torch.einsum("hqd,khd->hqk", rows, keys.repeat_interleave(groups, 1)) * scores.scale
        if scores.softcap is not None:
            logits = scores.softcap * torch.tanh(logits / scores.softcap)
        seen = step.mask(number, layer, 0)
        if seen is not None:
            logits = logits.masked_fill(~seen, float("-inf"))
        if scores.sinks is not None:
            logits = torch.cat([logits, scores.sinks.reshape(-1, 1, 1).expand(-1, segment.size, 1)], -1)
        weights = torch.softmax(logits, -1)[..., : segment.stop]
        out.append(torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(groups, 1)))
    return torch.cat(out)
