"""Between pages and files: what a session has cached, as named tensors, and back.

The same for every layer kind: K, V and indexer keys of a range of tokens by layer, states of recurrent layers by the
length at which they were kept and their dotted paths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from cache import state as states
from cache.pages import Page
from cache.stream import beside, fetched, put, sent
from cache.tier import MemoryTier

# The three things that pages hold, by the name under which they are saved.
POOLS: Mapping[str, Callable[[MemoryTier], dict[int, torch.Tensor]]] = {
    "key": lambda tier: tier.keys,
    "value": lambda tier: tier.values,
    "index": lambda tier: tier.indexes,
}


def rows_of(pages: Sequence[Page], page_size: int, first: int, stop: int) -> torch.Tensor:
    """Where tokens ``[first, stop)`` of a timeline lie in the pools of its tier, ``[stop - first]`` int64."""
    at = first // page_size
    slots = torch.tensor([page.slot for page in pages[at : -(-stop // page_size)]], dtype=torch.int64)
    rows = (slots[:, None] * page_size + torch.arange(page_size)).flatten()
    return rows[first - at * page_size :][: stop - first]


def gather(tier: MemoryTier, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """A copy of the tokens at ``rows``, by ``"<layer>.<kind>"``: ``[tokens, heads, dim]`` (indexer keys: ``[tokens,
    dim]``) on the CPU.
    """
    tier.settle()
    with beside(tier.device):
        rows = put(rows.numpy(), tier.device)
        return {
            f"{layer}.{kind}": fetched(pool.flatten(0, 1).index_select(0, rows))
            for kind, pools in POOLS.items()
            for layer, pool in pools(tier).items()
        }


def scatter(tier: MemoryTier, rows: torch.Tensor, name: str, tokens: torch.Tensor) -> None:
    """Put the tokens of one named tensor at ``rows``."""
    layer, kind = name.split(".")
    pool = POOLS[kind](tier)[int(layer)]
    with beside(tier.device):
        pool.flatten(0, 1).index_copy_(0, put(rows.numpy(), tier.device), sent(tokens, tier.device))


def shapes_of(tier: MemoryTier) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of one token in each named tensor."""
    return {
        f"{layer}.{kind}": (tuple(pool.shape[2:]), str(pool.dtype).removeprefix("torch."))
        for kind, pools in POOLS.items()
        for layer, pool in pools(tier).items()
    }


def packed_states(kept: Mapping[int, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """States by length as named tensors ``"checkpoint.<length>.<path>"`` and facts by the same names."""
    tensors: dict[str, torch.Tensor] = {}
    facts: dict[str, Any] = {}
    for length, state in kept.items():
        path = f"checkpoint.{length}"
        tensors |= {f"{path}.{at}": tensor for at, tensor in states.tensors_of(state).items()}
        facts |= {f"{path}.{at}": value for at, value in states.facts_of(state).items()}
    return tensors, facts


def unpacked_state(skeleton: Any, length: int, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> Any:
    """The state that was kept at ``length``; ``skeleton`` is any state of the same model."""
    return states.restored(skeleton, dict(tensors), dict(facts), f"checkpoint.{length}")


def parts_of(state: Any) -> dict[str, Any]:
    """Everything that is saved of a state, by its dotted path."""
    return states.tensors_of(state) | states.facts_of(state)


def kinds_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """What the parts of all states of a model have in common: types, dtypes, numbers of dimensions."""
    return {
        path: (part.dtype, part.dim()) if isinstance(part, torch.Tensor) else type(part) for path, part in parts.items()
    }


def lengths_of(names: Iterable[str]) -> tuple[int, ...]:
    """The lengths at which a file holds states, from its tensors' and facts' names."""
    return tuple(sorted({int(name.split(".")[1]) for name in names if name.startswith("checkpoint.")}))
