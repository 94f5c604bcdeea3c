"""Layer kinds: whether a layer stores KV, and which keys its queries may see.

Kinds are read from the layer types in the model's config (the names of ``transformers.cache_utils``), never from a
model's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs

_SLACK = 16


class Reach(StrEnum):
    """Which keys a query at position ``p`` may see; all are causal."""

    FULL = "full"  # every key
    SLIDING = "sliding"  # keys at p - window < k <= p
    CHUNKED = "chunked"  # keys of p's own chunk: k // window == p // window


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer. ``stores`` is False if the layer reads another layer's KV or has no attention."""

    reach: Reach
    window: int | None
    stores: bool

    @property
    def kind(self) -> tuple[Reach, int | None]:
        """Layers of the same kind see the same keys."""
        return self.reach, self.window

    def first_key(self, position: int) -> int:
        """The first position that the query at ``position`` may see."""
        if self.window is None:
            return 0
        if self.reach is Reach.SLIDING:
            return max(0, position - self.window + 1)
        return position - position % self.window

    def sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Which keys at positions ``[1, m]`` the queries at positions ``[n, 1]`` may see; bool ``[n, m]``."""
        return (key <= query) & self.near(query, key)

    def near(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """``sees [n, m]`` without the order of time: which keys are in the window of each query, also later ones."""
        if self.window is None:
            return torch.ones_like(key <= query)
        if self.reach is Reach.SLIDING:
            return key > query - self.window
        return key // self.window == query // self.window


@dataclass(frozen=True)
class Windows:
    """The windowed layers of a model: ``layers`` are those that store KV, ``kinds`` one layer of each kind."""

    layers: frozenset[int]
    kinds: tuple[AttentionLayer, ...]

    def first_key(self, position: int) -> int:
        """The first position that the query at ``position`` may see in any of them."""
        return min(kind.first_key(position) for kind in self.kinds)

    def first_kept(self, length: int) -> int:
        """The first position that a session of ``length`` tokens keeps however full memory is: what its next token
        sees, and what it would see without the newest sixteenth of that. Clients often write the end of a reply
        differently.
        """
        return self.first_key(length - (length - self.first_key(length)) // _SLACK)


def windows_of(layers: list[AttentionLayer], sources: dict[int, int | None]) -> Windows | None:
    """The windowed layers; None if there are none, or if a layer reads the keys of one of another kind. ``sources``:
    the layer whose keys each layer reads.
    """
    if any(source is None or layers[at].kind != layers[source].kind for at, source in sources.items()):
        return None
    near = [at for at, layer in enumerate(layers) if layer.window is not None]
    stored = frozenset(at for at in near if layers[at].stores)
    kinds = {layers[at].kind: layers[at] for at in near}
    return Windows(stored, tuple(kinds.values())) if stored else None


class ScoreOptions(NamedTuple):
    """How attention scores are computed, see ``packed_attention.attend``. ``sinks``: ``[H]`` or None."""

    scale: float
    softcap: float | None
    sinks: torch.Tensor | None


def read_layers(config: Any) -> list[AttentionLayer]:
    """The layers of a text decoder's ``config``, in order; empty if the config does not describe them.

    A kind that is neither windowed nor chunked is read as full attention. For a layer without attention that has no
    effect; if it is wrong for another layer the load-time probe detects it.
    """
    try:
        stored, _ = get_layer_types_and_kwargs(config)
        per_layer = config.per_layer_config
    except (AttributeError, TypeError, ValueError):
        return []
    declared = getattr(config, "layer_types", None) or stored
    return [_layer(declared[i], per_layer[i], stores=kind != "dummy") for i, kind in enumerate(stored)]


def _layer(kind: str, config: Any, *, stores: bool) -> AttentionLayer:
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    if not getattr(DYNAMIC_LAYER_TYPE_MAPPING.get(kind), "is_sliding", False):
        return AttentionLayer(Reach.FULL, None, stores)
    if "chunked" in kind and chunk:
        return AttentionLayer(Reach.CHUNKED, int(chunk), stores)
    return AttentionLayer(Reach.SLIDING, int(window), stores) if window else AttentionLayer(Reach.FULL, None, stores)
