"""A session's cache as plain tensors and facts: what is written to a lower tier, and read back.

The same for every layer kind: K, V and indexer keys of the pages by layer, states and checkpoints by their
dotted paths.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cache import state as states
from cache.pages import Page
from cache.session import SessionCache
from cache.tier import MemoryTier

Pools = Callable[[MemoryTier], dict[int, torch.Tensor]]

# The three things that pages hold, by the name under which they are saved.
_POOLS: dict[str, Pools] = {
    "key": lambda tier: tier.keys,
    "value": lambda tier: tier.values,
    "index": lambda tier: tier.indexes,
}


@dataclass(frozen=True)
class Snapshot:
    """``token_ids`` are the tokens fed, ``mask`` their flags.

    ``tensors``: ``"<layer>.key"`` ``[tokens, heads, dim]`` and so on, ``"state.<path>"``,
    ``"checkpoint.<length>.<path>"``, all on the CPU. ``facts``: numbers and flags of the states, by the same paths.
    """

    tenant: str
    name: str | None
    token_ids: array[int]
    mask: bytes
    long: bool
    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]


def take(session: SessionCache, layers: list[int]) -> Snapshot:
    """A copy of all that ``session`` has cached, wherever its pages lie; ``layers`` are those that store pages."""
    tensors: dict[str, torch.Tensor] = {}
    for name, pools in _POOLS.items():
        for layer in layers:
            if (joined := _read(session.pages, pools, layer)) is not None:
                tensors[f"{layer}.{name}"] = joined[: session.length].clone()
    facts: dict[str, Any] = {}
    for path, state in _states(session).items():
        tensors |= {f"{path}.{at}": tensor.to("cpu", copy=True) for at, tensor in states.tensors_of(state).items()}
        facts |= {f"{path}.{at}": value for at, value in states.facts_of(state).items()}
    mask = bytes(session.mask)
    return Snapshot(session.tenant, session.name, session.cached, mask, session.long, tensors, facts)


def fill(session: SessionCache, snapshot: Snapshot, tier: MemoryTier, skeleton: Any) -> None:
    """Make ``session``, whose pages are new, what ``snapshot`` tells; ``skeleton`` is any state of the same model."""
    index = torch.tensor(
        [
            session.pages[i // tier.page_size].slot * tier.page_size + i % tier.page_size
            for i in range(len(snapshot.mask))
        ],
        dtype=torch.int64,
        device=tier.device,
    )
    for path, tensor in snapshot.tensors.items():
        layer, name = path.split(".")[:2]
        if layer.isdecimal():
            _POOLS[name](tier)[int(layer)].flatten(0, 1)[index] = tensor.to(tier.device)
    session.token_ids = array("i", snapshot.token_ids)
    session.mask = bytearray(snapshot.mask)
    session.hidden = session.mask.count(0)
    session.long = snapshot.long
    if session.stateful:
        lengths = {int(path.split(".")[1]) for path in snapshot.tensors if path.startswith("checkpoint.")}
        session.checkpoints = {n: _state(f"checkpoint.{n}", snapshot, skeleton) for n in sorted(lengths)}
        session.state = _state("state", snapshot, skeleton)
        session.move(tier.device)


def _states(session: SessionCache) -> dict[str, Any]:
    if not session.stateful:
        return {}
    return {"state": session.state} | {f"checkpoint.{n}": state for n, state in session.checkpoints.items()}


def _state(path: str, snapshot: Snapshot, skeleton: Any) -> Any:
    return states.restored(skeleton, snapshot.tensors, snapshot.facts, path)


def _read(pages: list[Page], pools: Pools, layer: int) -> torch.Tensor | None:
    """What the pages hold of one layer, ``[pages * page_size, ...]`` on the CPU; None where that layer keeps
    no such thing.
    """
    if not pages or layer not in pools(pages[0].tier):
        return None
    return torch.cat([pools(page.tier)[layer][page.slot].to("cpu") for page in pages])
