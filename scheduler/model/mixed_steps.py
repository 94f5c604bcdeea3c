"""Steps in which some sessions feed prompts and others their next token.

They can run in one forward, which has no CUDA graph, or in two: the next tokens from a graph, and the prompts. Two read
the weights twice, and one long prompt hides what launching kernels takes; so both are timed at load.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cache.memory.memory_tier import MemoryTier
from cache.pages.packed import PackedStep
from cache.pages.pool import Page
from cache.pages.session import SessionCache
from scheduler.forward.mode import Mode

Work = Sequence[tuple[SessionCache, int]]

_PROMPTS = (16, 64, 256, 1024, 4096)  # tokens that are timed
_ROUNDS = 3


def longest_beside(
    run: Callable[[Work], torch.Tensor | None], mode: Mode, tier: MemoryTier, work: Work, context: int
) -> int:
    """The most tokens of prompts beside which a step of ``work`` is faster as a graph, which ``run`` launches, than in
    one forward with them; 0 where it never is, or ``work`` has no graph. ``context``: the most that may be tried.
    """
    if run(work) is None:
        return 0
    longest = 0
    pages: list[Page] = []
    try:
        for tokens in (size for size in _PROMPTS if size <= context):
            while len(pages) * tier.page_size < tokens and tier.fits(1, 1):
                pages.append(Page(tier, tier.alloc(), tier.alloc(near=True)))
            if len(pages) * tier.page_size < tokens:
                break

            def in_one(tokens: int = tokens) -> Any:
                return _forward(mode, tier, [*work, (_prompt(mode, pages, tokens), tokens)])

            def in_two(tokens: int = tokens) -> Any:
                run(work)
                return _forward(mode, tier, [(_prompt(mode, pages, tokens), tokens)])

            if min(_seconds(in_two) for _ in range(_ROUNDS)) >= min(_seconds(in_one) for _ in range(_ROUNDS)):
                break
            longest = tokens
    except torch.OutOfMemoryError:
        pass  # such steps are shorter while serving
    finally:
        for page in pages:
            tier.release(page.slot)
            tier.release(page.near, near=True)
    return longest


def _prompt(mode: Mode, pages: Sequence[Page], tokens: int) -> SessionCache:
    """A new session that feeds a prompt."""
    session = SessionCache("", None, mode.stateful)
    session.token_ids = array("i", [1] * tokens)
    session.pages = [*pages]
    return session


def _forward(mode: Mode, tier: MemoryTier, work: Work) -> torch.Tensor:
    keep = torch.arange(len(work), device=tier.device)
    return mode.forward(PackedStep(work, tier), keep)


def _seconds(run: Callable[[], torch.Tensor]) -> float:
    """How long ``run`` takes, the device's time included."""
    began = time.perf_counter()
    float(run()[0, 0])
    return time.perf_counter() - began
