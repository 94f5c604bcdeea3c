"""The load-time probe: which mode runs this model right, measured on the model itself, about a second.

Three made-up sessions of different lengths are prefilled, prefilled in chunks, decoded and resumed in shared
steps; every logit is compared with a from-scratch forward of that session alone through the model's own
attention. The first mode that agrees is used; a model that no mode serves right is refused with the reasons.
No table of names.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import torch

from cache.layers import Layer
from cache.pages import PagePool
from cache.session import SessionCache
from cache.store import SessionStore
from cache.tier import MemoryTier, PageShape
from scheduler.modes import MODES, Mode, installed
from scheduler.runner import ModelRunner

# What rounding alone may do: root mean square of the difference over the standard deviation of the logits.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}

# Lengths of the three sessions, and the steps: (session, tokens) fed together, in shuffled order.
_LENGTHS = (22, 42, 18)
_STEPS = (
    ((0, 5),),
    ((0, 1), (1, 17)),
    ((1, 13), (0, 1), (2, 11)),
    *(((2, 1), (0, 1), (1, 1)),) * 4,
    ((0, 8), (1, 5), (2, 1)),
    *(((0, 1), (2, 1), (1, 1)),) * 2,
    ((1, 1),),
)


@dataclass(frozen=True)
class Verdict:
    """The mode that was chosen and installed, what it stores per token, and the measured error of each mode tried."""

    mode: Mode
    shapes: dict[int, PageShape]
    report: str


class Refused(Exception):
    """No mode runs this model right; the message says why, mode by mode."""


def probe(model: Any, layers: list[Layer], page_size: int) -> Verdict:
    """Choose and install the mode for ``model``. Raises ``Refused``; the model is then as it was."""
    ids = _made_up(model)
    expected = [alone(model, tokens) for tokens in ids]
    tolerance = TOLERANCE.get(expected[0].dtype, 6e-2)
    tried: list[str] = []
    for kind in MODES:
        try:
            with installed(kind(model, layers)) as mode:
                error, shapes = _measure(mode, ids, expected, page_size)
                tried.append(f"{mode.name} error {error:.1e}")
                if error > tolerance:
                    raise ValueError(f"error {error:.1e}, allowed {tolerance:.0e}")
                _shorten(mode, ids, expected, page_size, tolerance)
                return Verdict(mode, shapes, ", ".join(tried))
        except Exception as error:  # whatever a mode raises on this model is its verdict on it
            tried.append(f"{kind.name}: {error or type(error).__name__}")
    raise Refused("; ".join(dict.fromkeys(tried)))


def _shorten(mode: Mode, ids: list[array[int]], expected: list[torch.Tensor], page_size: int, tolerance: float) -> None:
    """Take the mode's short cuts where they measure right as well."""
    mode.learn()
    error, _ = _measure(mode, ids, expected, page_size)
    if error > tolerance:
        mode.in_place = frozenset()


def _made_up(model: Any) -> list[array[int]]:
    generator = torch.Generator().manual_seed(0)
    width = model.get_input_embeddings().num_embeddings
    return [array("i", torch.randint(0, width, (n,), generator=generator).tolist()) for n in _LENGTHS]


@torch.inference_mode()
def alone(model: Any, ids: array[int]) -> torch.Tensor:
    """The oracle: logits ``[len(ids), V]`` of a from-scratch forward of one timeline, no cache."""
    tokens = torch.tensor([list(ids)], device=model.device)
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False, return_dict=True).logits[0]
    return logits


def _measure(
    mode: Mode, ids: list[array[int]], expected: list[torch.Tensor], page_size: int
) -> tuple[float, dict[int, PageShape]]:
    """The worst error of any session over all steps, and the shapes that the layers store."""
    pages = sum(-(-n // page_size) for n in _LENGTHS)
    tier = MemoryTier(pages, page_size, mode.model.device)
    store = SessionStore(PagePool(tier, MemoryTier(0, page_size, torch.device("cpu"))))
    runner = ModelRunner(mode, tier)
    sessions = [SessionCache("probe", None) for _ in ids]
    for session, tokens in zip(sessions, ids, strict=True):
        session.token_ids = tokens
        session.warm = session.running = True
        store.reserve(session, len(tokens))
    got: list[list[torch.Tensor]] = [[] for _ in ids]
    for work in _STEPS:
        rows = sum(count for _, count in work)
        logits = runner.run([(sessions[i], count) for i, count in work], range(rows))
        parts = torch.split(logits, [count for _, count in work])
        for (i, _), part in zip(work, parts, strict=True):
            got[i].append(part)
    errors = [_error(torch.cat(g), want.float()) for g, want in zip(got, expected, strict=True)]
    return max(errors), tier.shapes


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    want = want[: got.shape[0]]
    return float((got - want).square().mean().sqrt() / want.std())
