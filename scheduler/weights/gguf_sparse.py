"""Settings of layers whose attention reads only some blocks of the keys, from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler.weights.gguf_experts import check_normed
from scheduler.weights.gguf_file import GgufFile
from scheduler.weights.gguf_header import GgufError


def read_chosen_blocks(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Layers with tensors that choose blocks, and the widths of multilayer perceptrons: of layers without experts, and
    beside experts. The bounds of activations are those of all released models, and of llama.cpp.
    """
    check_normed(keys)
    width, count = keys.get("expert_feed_forward_length"), keys.get("expert_shared_count")
    turned = keys.get("rope.dimension_count")
    if not width or not count or not turned or "feed_forward_length" not in keys:
        raise GgufError("the file does not say how wide its layers are, or which part of a head positions turn")
    chosen = [f"blk.{number}.indexer.q_proj.weight" in file.tensors for number in range(said["num_hidden_layers"])]
    return {
        "layer_types": ["minimax_m3_sparse" if each else "full_attention" for each in chosen],
        "dense_intermediate_size": keys["feed_forward_length"],
        "shared_intermediate_size": width * count,
        "rotary_dim": turned,
    }
