"""Settings of attention whose keys and values are made of latents, from the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from scheduler.weights.gguf.file import GgufFile
from scheduler.weights.gguf.header import GgufError
from scheduler.weights.gguf.needed import INDEXER

_LONG = 1 << 20  # a context from which on layers may share what they choose
# What is said of layers with a window.
_WINDOWED = (
    "rope.freq_base_swa",
    "attention.kv_lora_rank_swa",
    "attention.key_length_mla_swa",
    "attention.value_length_mla_swa",
)


def read_latents(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The widths of heads whose keys and values are made of latents. Older files say them as those of other heads."""
    key = keys.get("attention.key_length_mla", keys.get("attention.key_length"))
    value = keys.get("attention.value_length_mla", keys.get("attention.value_length"))
    turned = keys.get("rope.dimension_count")
    if not key or not value or not turned or "attention.kv_lora_rank" not in keys:
        raise GgufError("the file does not say how wide the parts of its keys and values are")
    found = {
        "q_lora_rank": keys.get("attention.q_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": key - turned,
        "v_head_dim": value,
        "head_dim": turned,
        "num_key_value_heads": said["num_attention_heads"],
    }
    if "rope_scaling" in said and "rope.scaling.yarn_log_multiplier" in keys:
        scale = round(keys["rope.scaling.yarn_log_multiplier"] * 10, 6)  # of a file's float32
        found["rope_scaling"] = {**said["rope_scaling"], "mscale": scale, "mscale_all_dim": scale}
    return found


def read_growing_latents(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Queries that grow with the logarithm of their positions. Files of mistral4 do not say how much: as in the one
    model that there is.
    """
    growth = keys.get("attention.temperature_scale", 0.1 if file.architecture == "mistral4" else 0.0)
    if not growth:
        return {}
    if "rope_scaling" not in said:
        raise GgufError("the file does not say how its rotary positions are stretched")
    width = said["qk_nope_head_dim"] + said["qk_rope_head_dim"]
    more = {
        "rope_theta": keys.get("rope.freq_base", 10_000.0),
        "partial_rotary_factor": said["qk_rope_head_dim"] / width,
        "llama_4_scaling_beta": growth,
    }
    return {"head_dim": width, "rope_parameters": {**said["rope_scaling"], **more}}


def read_scaled_latents(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Latents in MiniCPM 3. Its files do not say how wide values are, which their tensors show, nor what embeddings,
    layers and logits are multiplied by, nor the base of rotary positions: as in the one model that there is.
    """
    output = file.tensors.get("blk.0.attn_output.weight")
    if output is None or len(output.shape) != 2:
        raise GgufError("the file does not say how wide the parts of its keys and values are")
    return read_latents(file, {**keys, "attention.value_length": output.shape[1] // said["num_attention_heads"]}, said)


def read_indexers(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """What chooses the keys that are attended to."""
    if any(key not in keys for key in INDEXER):
        raise GgufError("the file does not say how the keys that are attended to are chosen")
    if "attention.q_lora_rank" not in keys:
        raise GgufError("its queries are not made of latents, which those of transformers' model are")
    return {"layer_types": said.get("layer_types", ["indexed_attention"] * said["num_hidden_layers"])}


def read_shared_indexers(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The same where layers may attend to the keys that an earlier one has chosen. Older files do not say which: in
    models of shorter contexts none did.
    """
    layers, own = said["num_hidden_layers"], keys.get("attention.indexer.types")
    if own is None and keys.get("context_length", _LONG) < _LONG:
        own = [True] * layers
    if not isinstance(own, list) or len(own) < layers or not own[0]:
        raise GgufError("the file does not say which of its layers choose the keys that are attended to")
    kinds = ["full" if each else "shared" for each in own[:layers]]
    return {"indexer_types": kinds, **read_indexers(file, keys, said)}


def read_indexed_layers(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Which layers choose what they attend to, and which attend to what the one before has chosen; how large numbers in
    experts may be.
    """
    chooses, limits = keys.get("attention.indexer.types"), keys.get("swiglu_clamp_exp", [math.inf])
    if not isinstance(chooses, list) or len(chooses) != said["num_hidden_layers"] or not chooses[0]:
        raise GgufError("the file does not say which of its layers choose what they attend to")
    if not isinstance(limits, list) or len(set(limits)) != 1:
        raise GgufError("its layers differ in how large numbers in experts may be, which those of its model do not")
    return {"indexer_types": ["full" if each else "shared" for each in chooses], "swiglu_limit": limits[0]}


def read_two_latents(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Layers with a window have latents and heads of their own widths, and rotary positions of their own; those without
    one attend to keys that are chosen. What latents are multiplied by is in the weights of their norms: the one model
    that there is multiplies them.
    """
    layers, dense = said["num_hidden_layers"], keys.get("leading_dense_block_count", 0)
    windowed, heads = keys.get("attention.sliding_window_pattern"), keys.get("attention.head_count")
    if not isinstance(windowed, list) or not isinstance(heads, list) or min(len(windowed), len(heads)) < layers:
        raise GgufError("the file does not say of each layer whether it has a sliding window, and how many heads")
    windowed = windowed[:layers]
    if all(windowed) or not any(windowed) or any(key not in keys for key in _WINDOWED):
        raise GgufError("the file does not say how wide the parts of its keys and values are")
    if "rope_scaling" in said:
        raise GgufError("its rotary positions are stretched, which those of transformers' model are not")
    full, own = heads[windowed.index(False)], heads[windowed.index(True)]
    found = read_latents(file, keys, {**said, "num_attention_heads": full})
    bases = {"indexed": keys.get("rope.freq_base", 80_000_000.0), "sliding": keys["rope.freq_base_swa"]}
    return {
        **found,
        "num_attention_heads": full,
        "layer_types": ["sliding_attention" if each else "indexed_attention" for each in windowed],
        "mlp_layer_types": ["dense" if number < dense else "sparse" for number in range(layers)],
        "shared_experts_intermediate_size": said["moe_intermediate_size"],
        "rope_parameters": {
            f"{name}_attention": {"rope_type": "default", "rope_theta": base} for name, base in bases.items()
        },
        "swa_num_attention_heads": own,
        "swa_num_key_value_heads": own,
        "swa_q_lora_rank": found["q_lora_rank"],
        "swa_kv_lora_rank": keys["attention.kv_lora_rank_swa"],
        "swa_head_dim": keys["attention.key_length_mla_swa"],
        "swa_qk_nope_head_dim": keys["attention.key_length_mla_swa"] - found["qk_rope_head_dim"],
        "swa_v_head_dim": keys["attention.value_length_mla_swa"],
    }
