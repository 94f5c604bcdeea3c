"""Settings of layers whose attention reads only some blocks of the keys, and of layers that look up n-grams of tokens,
from the metadata of a GGUF file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler.weights.gguf.ends import as_setting, listed
from scheduler.weights.gguf.experts import check_normed
from scheduler.weights.gguf.file import GgufFile
from scheduler.weights.gguf.header import GgufError

# Buffers of a module that hashes n-grams, and the keys of what is in them.
HASHED = {
    "layer_multipliers": "layer_multipliers",
    "ngram_heads_offsets": "head_offsets",
    "ngram_heads_vocab_sizes": "head_vocab_sizes",
}


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


def read_compressed_blocks(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Blocks that are chosen by the mean of their keys, all of one length, and by one head of keys. The gates of linear
    attention are those that llama.cpp computes for all of these models.
    """
    lengths = set(keys.get("attention.compress_ratios") or ()) - {0}
    if len(lengths) != 1 or "attention.indexer.top_k" not in keys:
        raise GgufError("the file does not say how long the blocks of keys are that its layers choose")
    return {"indexer_compress_ratio": lengths.pop(), "indexer_kv_heads": 1, "output_gate_type": "sigmoid"}


def read_ngrams(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The layer that looks up n-grams, and the numbers by which these are hashed. They do not go beyond a token that
    ends a text, which configurations name first of the ends.
    """
    layers = keys.get("ple.layers")
    if not layers:
        return {}
    hashed = {name: keys.get(f"ple.{key}") for name, key in HASHED.items()}
    sizes, width = hashed["ngram_heads_vocab_sizes"], keys.get("embedding_length_per_layer_input")
    end = keys.get("ple.eos_token_id")
    if len(layers) != 1 or not all(hashed.values()) or not isinstance(sizes, list) or not width or end is None:
        raise GgufError("the file does not say how its layer with n-grams hashes them")
    return {
        **hashed,
        "ple_layer_ids": [layers[0] + 1],
        "ple_embed_dim": width * len(sizes),
        "ngram_vocab_size_base": min(sizes),
        "eos_token_id": as_setting([end, *listed(said.get("eos_token_id"))]),
    }
