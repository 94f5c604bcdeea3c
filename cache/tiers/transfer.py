"""Conversion between pages and states in memory and the named tensors of segment files.

It is the same for all layer kinds: K, V and indexer keys of a range of tokens are named by layer (``MemoryTier.gather``
and ``scatter``), states of recurrent layers by their length and dotted path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cache.pages import state as states
from cache.pages.pool import Page


def rows_of(pages: Sequence[Page], page_size: int, first: int, stop: int, near: bool = False) -> torch.Tensor:
    """The slot * page_size + offset of tokens ``[first, stop)`` in the pools of their tier, ``[stop - first]``
    int64: in those of windowed layers if ``near``.
    """
    at = first // page_size
    chosen = pages[at : -(-stop // page_size)]
    slots = torch.tensor([page.near if near else page.slot for page in chosen], dtype=torch.int64)
    rows = (slots[:, None] * page_size + torch.arange(page_size)).flatten()
    return rows[first - at * page_size :][: stop - first]


def pack_states(kept: Mapping[int, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """States by length as tensors named ``"checkpoint.<length>.<path>"``, and facts with names of the same form."""
    tensors: dict[str, torch.Tensor] = {}
    facts: dict[str, Any] = {}
    for length, state in kept.items():
        path = f"checkpoint.{length}"
        tensors |= {f"{path}.{at}": tensor for at, tensor in states.tensors_of(state).items()}
        facts |= {f"{path}.{at}": value for at, value in states.facts_of(state).items()}
    return tensors, facts


def unpack_state(skeleton: Any, length: int, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> Any:
    """The state at ``length`` from named tensors of any shape and facts; ``skeleton``: any state of the same model."""
    return states.restore(skeleton, dict(tensors), dict(facts), f"checkpoint.{length}")


def parts_of(state: Any) -> dict[str, Any]:
    """All tensors and facts of a state by their dotted paths."""
    return states.tensors_of(state) | states.facts_of(state)


def kinds_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The types, dtypes and numbers of dimensions of the parts, which are the same for all states of a model."""
    return {
        path: (part.dtype, part.dim()) if isinstance(part, torch.Tensor) else type(part) for path, part in parts.items()
    }
