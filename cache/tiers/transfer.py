"""Conversion between pages and states in memory and the named tensors of segment files.

The same for every layer kind: K, V and indexer keys of a range of tokens by layer (``MemoryTier.gather`` and
``scatter``), states of recurrent layers by the length at which they were kept and their dotted paths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cache.pages import state as states
from cache.pages.pool import Page


def rows_of(pages: Sequence[Page], page_size: int, first: int, stop: int) -> torch.Tensor:
    """Where tokens ``[first, stop)`` of a timeline lie in the pools of its tier, ``[stop - first]`` int64."""
    at = first // page_size
    slots = torch.tensor([page.slot for page in pages[at : -(-stop // page_size)]], dtype=torch.int64)
    rows = (slots[:, None] * page_size + torch.arange(page_size)).flatten()
    return rows[first - at * page_size :][: stop - first]


def pack_states(kept: Mapping[int, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """States by length as named tensors ``"checkpoint.<length>.<path>"`` and facts by the same names."""
    tensors: dict[str, torch.Tensor] = {}
    facts: dict[str, Any] = {}
    for length, state in kept.items():
        path = f"checkpoint.{length}"
        tensors |= {f"{path}.{at}": tensor for at, tensor in states.tensors_of(state).items()}
        facts |= {f"{path}.{at}": value for at, value in states.facts_of(state).items()}
    return tensors, facts


def unpack_state(skeleton: Any, length: int, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> Any:
    """The state that was kept at ``length``; ``skeleton`` is any state of the same model."""
    return states.restore(skeleton, dict(tensors), dict(facts), f"checkpoint.{length}")


def parts_of(state: Any) -> dict[str, Any]:
    """Everything that is saved of a state, by its dotted path."""
    return states.tensors_of(state) | states.facts_of(state)


def kinds_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """What the parts of all states of a model have in common: types, dtypes, numbers of dimensions."""
    return {
        path: (part.dtype, part.dim()) if isinstance(part, torch.Tensor) else type(part) for path, part in parts.items()
    }
