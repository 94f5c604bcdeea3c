"""How the file of an embedding model says that it pools. Imported by both processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler.gguf_reader import GgufError

_MODES = {1: "mean", 2: "cls", 3: "lasttoken"}  # GGUF's numbers; 0: hidden states are not pooled
_BOTH_WAYS = ("bert", "gemma-embedding", "modern-bert", "nomic-bert")  # architectures whose models' attention is so too
DENSE = {"gemma-embedding": ("dense_2", "dense_3")}  # layers behind the pooling that all models of these have


def pooling_of(metadata: Mapping[str, Any]) -> str | None:
    """How hidden states are pooled, by sentence-transformers' name; None for a model that generates. Raises
    ``GgufError`` for one that scores texts, or looks both ways where transformers' model does not.
    """
    architecture = metadata.get("general.architecture")
    kind = metadata.get(f"{architecture}.pooling_type")
    both_ways = architecture in _BOTH_WAYS or metadata.get(f"{architecture}.attention.causal") is False
    if not kind and both_ways:
        raise GgufError("its attention looks both ways, and the file does not say how it pools")
    if not kind:
        return None
    if not isinstance(kind, int) or kind not in _MODES:
        raise GgufError("it pools for scores of texts, or in another way that is not known")
    if both_ways and architecture not in _BOTH_WAYS:
        raise GgufError("its attention looks both ways, which that of transformers' model does not")
    return _MODES[kind]


def dense_layers(metadata: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """The linear layers behind the pooling, in order: the name of the tensor, and how many numbers go in and come out.
    Raises ``GgufError`` where a model has some and its file has not.
    """
    architecture = metadata.get("general.architecture")
    found: dict[str, tuple[int, int]] = {}
    for name in DENSE.get(str(architecture), ()):
        into, out = (metadata.get(f"{architecture}.{name}_feat_{end}") for end in ("in", "out"))
        if not isinstance(into, int) or not isinstance(out, int):
            raise GgufError("the file does not have the dense layers behind its pooling")
        found[f"{name}.weight"] = (into, out)
    return found
