"""Settings of hybrid models: which layers of a GGUF file have attention, and the widths of the others, which keep a
state instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler.weights.gguf_file import GgufFile, largest
from scheduler.weights.gguf_header import GgufError

# Tensors that a layer of a single part has, and what the configuration calls such a layer.
_PARTS = {"attn_q": "full_attention", "ssm_in": "linear_attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}


def read_convolutions(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Layers without heads for keys are convolutions."""
    heads = keys.get("attention.head_count_kv")
    if not isinstance(heads, list):
        raise GgufError("the file does not say which of its layers have attention")
    kinds = ["full_attention" if each else "conv" for each in heads]
    return {"layer_types": kinds, "block_auto_adjust_ff_dim": False}


def read_mamba(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Layers without heads for keys are of Mamba 2; the widths of those, and of the multilayer perceptron that all have
    beside experts, or alone.
    """
    heads, inner = keys.get("attention.head_count_kv"), keys.get("ssm.inner_size")
    count, hidden = keys.get("ssm.time_step_rank"), said["hidden_size"]
    if not isinstance(heads, list) or len(heads) != said["num_hidden_layers"] or not inner or not count:
        raise GgufError("the file does not say which of its layers have attention")
    first = next((number for number, each in enumerate(heads) if not each), 0)
    width = keys.get("expert_shared_feed_forward_length", largest(keys.get("feed_forward_length")))
    return {
        "layer_types": ["attention" if each else "mamba" for each in heads],
        "mamba_n_heads": count,
        "mamba_d_head": inner // count,
        "mamba_expand": inner // hidden,
        "mamba_d_state": keys.get("ssm.state_size", 128),
        "mamba_d_conv": keys.get("ssm.conv_kernel", 4),
        "mamba_n_groups": keys.get("ssm.group_count", 1),
        "mamba_conv_bias": f"blk.{first}.ssm_conv1d.bias" in file.tensors,
        "mamba_proj_bias": f"blk.{first}.ssm_in.bias" in file.tensors,
        "intermediate_size": largest(keys.get("feed_forward_length")),
        "shared_intermediate_size": width,
        "num_local_experts": keys.get("expert_count", 0),
        "position_embedding_type": "rope" if keys.get("rope.scaling.finetuned") else "nope",
    }


def read_linear_attention(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The heads of linear attention, and the layers that have it. The last layers may be for predicting further tokens,
    which are not run.
    """
    width, heads = keys.get("ssm.inner_size"), keys.get("ssm.time_step_rank")
    if not width or not heads:
        raise GgufError("the file does not say how many heads its linear attention has")
    layers = said["num_hidden_layers"] - keys.get("nextn_predict_layers", 0)
    every = keys.get("full_attention_interval") or 4
    linear = keys.get("attention.recurrent_layers", [number % every for number in range(1, layers + 1)])
    if not isinstance(linear, list) or len(linear) < layers:
        raise GgufError("the file does not say which of its layers have linear attention")
    found = {
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if each else "full_attention" for each in linear[:layers]],
        "linear_value_head_dim": width // heads,
    }
    if "intermediate_size" in said:
        found["intermediate_size"] = keys.get("feed_forward_length", width)
    return found


def read_single_parts(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Layers that are attention, or a multilayer perceptron, or experts, or Mamba 2, and no two of them: their tensors
    show which.
    """
    kinds = [
        _kind_of(file, number) for number in range(said["num_hidden_layers"] - keys.get("nextn_predict_layers", 0))
    ]
    inner, count, routed = keys.get("ssm.inner_size"), keys.get("ssm.time_step_rank"), "moe" in kinds
    if not inner or not count or inner % count:
        raise GgufError("the file does not say how wide its layers of Mamba 2 are")
    if isinstance(keys.get("expert_used_count"), list) or isinstance(keys.get("expert_feed_forward_length"), list):
        raise GgufError("its layers differ in their experts, which those of transformers' model do not")
    if keys.get("expert_group_count", 1) > 1 and "expert_group_used_count" not in keys:
        raise GgufError(
            "the file does not say how many groups of experts are used: put the model's config.json beside it"
        )
    wide = f"blk.{kinds.index('mlp')}.ffn_up.weight" if "mlp" in kinds else ""
    return {
        "layers_block_type": kinds,
        "intermediate_size": file.tensors[wide].shape[0] if wide else largest(keys.get("feed_forward_length")),
        "mamba_num_heads": count,
        "mamba_head_dim": inner // count,
        "use_conv_bias": _any(file, "ssm_conv1d.bias"),
        "use_bias": _any(file, "ssm_in.bias"),
        "mlp_bias": _any(file, "ffn_up.bias"),
        **({"norm_topk_prob": keys.get("expert_weights_norm", False)} if routed else {}),
    }


def _kind_of(file: GgufFile, number: int) -> str:
    found = [kind for leaf, kind in _PARTS.items() if f"blk.{number}.{leaf}.weight" in file.tensors]
    if len(found) != 1:
        raise GgufError(f"layer {number} of the file is not of a kind that transformers' model has")
    return found[0]


def _any(file: GgufFile, leaf: str) -> bool:
    """Whether some layer has a tensor of this name."""
    return any(name.endswith(f".{leaf}") for name in file.tensors)
