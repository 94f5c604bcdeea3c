"""Settings of layers that attend to runs of tokens, each compressed to one, from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler.weights.gguf.file import GgufFile
from scheduler.weights.gguf.header import GgufError

_SQRT_SOFTPLUS = 4  # GGUF's number of a function of experts' scores
# What configurations call layers that attend to a window only, to chosen runs besides, and to all of them.
_WINDOW, _CHOSEN, _ALL = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {_CHOSEN: 4, _ALL: 128}  # where no layer says it
_NEEDED = (
    "attention.key_length",
    "attention.compress_rope_freq_base",
    "attention.output_group_count",
    "attention.output_lora_rank",
    "hash_layer_count",
    "hyper_connection.count",
    "hyper_connection.epsilon",
    "hyper_connection.sinkhorn_iterations",
    "rope.dimension_count",
)


def read_compressed_layers(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The kinds of layers, and how much they compress; positions are stretched for what is compressed only. The first
    layers may choose experts by a table.
    """
    layers, ratios = said["num_hidden_layers"], keys.get("attention.compress_ratios")
    if not isinstance(ratios, list) or len(ratios) < layers or any(key not in keys for key in _NEEDED):
        raise GgufError("the file does not say how the attention of its layers is compressed")
    kinds, rates = [_kind_of(file, number, ratios[number]) for number in range(layers)], dict(_RATES)
    rates |= {kind: ratio for kind, ratio in zip(kinds, ratios, strict=False) if ratio}
    if any(kind != _WINDOW and ratio != rates[kind] for kind, ratio in zip(kinds, ratios, strict=False)):
        raise GgufError("layers of a kind in the file do not compress equally much")
    turned = {"partial_rotary_factor": keys["rope.dimension_count"] / keys["attention.key_length"]}
    stretched = said.get("rope_scaling", {"rope_type": "default"})
    if stretched["rope_type"] != "default":
        stretched = {"attention_factor": 1.0, **stretched}
    hashed = keys["hash_layer_count"]
    return {
        **turned,
        "layer_types": kinds,
        "compress_rates": rates,
        "mlp_layer_types": ["hash_moe" if number < hashed else "moe" for number in range(layers)],
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": keys.get("rope.freq_base", 10_000.0), **turned},
            "compress": {**stretched, "rope_theta": keys["attention.compress_rope_freq_base"], **turned},
        },
    }


def read_bounded_experts(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The bound of what experts multiply, which is one for all. Transformers' model normalises their weights."""
    if keys.get("expert_gating_func") != _SQRT_SOFTPLUS or not keys.get("expert_weights_norm"):
        raise GgufError("the scores of its experts are not normalised roots of softplus, which those of its model are")
    bounds = {each for name in ("exp", "shexp") for each in keys.get(f"swiglu_clamp_{name}", [])}
    if len(bounds) != 1:
        raise GgufError("the file does not say one bound of what its experts multiply")
    return {"swiglu_limit": bounds.pop(), "intermediate_size": said["moe_intermediate_size"]}


def _kind_of(file: GgufFile, number: int, ratio: int) -> str:
    """What configurations call a layer."""
    if not ratio:
        return _WINDOW
    return _CHOSEN if f"blk.{number}.indexer.attn_q_b.weight" in file.tensors else _ALL
