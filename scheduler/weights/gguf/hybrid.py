"""Settings of hybrid models: which layers of a GGUF file have attention, and the widths of the others, which keep a
state instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scheduler.weights.gguf.file import GgufFile, largest
from scheduler.weights.gguf.header import GgufError

# Architectures whose files have their weights multiplied by numbers that the model has as settings, and those.
MULTIPLIED = frozenset({"falcon-h1"})
_MULTIPLIERS = (
    "attention_in_multiplier",
    "attention_out_multiplier",
    "embedding_multiplier",
    "key_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
)
# Tensors that a layer of a single part has, and what the configuration calls such a layer.
_PARTS = {
    "attn_q": "full_attention",
    "attn_qkv": "full_attention",
    "ssm_in": "linear_attention",
    "ffn_gate_inp": "moe",
    "ffn_up": "mlp",
}


def read_convolutions(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Layers without heads for keys are convolutions."""
    heads = keys.get("attention.head_count_kv")
    if not isinstance(heads, list):
        raise GgufError("the file does not say which of its layers have attention")
    kinds = ["full_attention" if each else "conv" for each in heads]
    return {"layer_types": kinds, "block_auto_adjust_ff_dim": False}


def has_rotary_positions(keys: Mapping[str, Any]) -> bool:
    """Whether attention among layers of Mamba 2 has rotary positions. It then has no scale of its own."""
    return bool(keys.get("rope.scaling.finetuned")) and "attention.scale" not in keys


def read_mamba(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Layers without heads for keys are of Mamba 2; the widths of those, and of the multilayer perceptron that all have
    beside experts, or alone.
    """
    heads = keys.get("attention.head_count_kv")
    if not isinstance(heads, list) or len(heads) != said["num_hidden_layers"]:
        raise GgufError("the file does not say which of its layers have attention")
    widths = _widths_of_mamba(file, keys)
    widths["mamba_expand"] = widths["mamba_n_heads"] * widths["mamba_d_head"] // said["hidden_size"]
    widths["intermediate_size"] = largest(keys.get("feed_forward_length"))
    if has_rotary_positions(keys):
        return {**widths, "attn_layer_indices": [number for number, each in enumerate(heads) if each]}
    width = keys.get("expert_shared_feed_forward_length", largest(keys.get("feed_forward_length")))
    return {
        "layer_types": ["attention" if each else "mamba" for each in heads],
        **widths,
        "shared_intermediate_size": width,
        "num_local_experts": keys.get("expert_count", 0),
        "position_embedding_type": "rope" if keys.get("rope.scaling.finetuned") else "nope",
    }


def read_parallel_parts(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Layers that are attention and Mamba 2 side by side. What the model multiplies by is in the weights."""
    if "output.weight" not in file.tensors:
        raise GgufError(
            "its head is its embeddings, and the file does not say what they are multiplied by: put the model's "
            "config.json beside it"
        )
    if _any(file, "attn_q.bias") or _any(file, "attn_qkv.bias"):
        raise GgufError("its attention has biases, and the file does not say what they are multiplied by")
    widths = _widths_of_mamba(file, keys)
    return {
        **widths,
        "mamba_d_ssm": widths["mamba_n_heads"] * widths["mamba_d_head"],
        "mamba_rms_norm": _any(file, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "intermediate_size": keys.get("feed_forward_length"),
        "projectors_bias": _any(file, "ssm_out.bias"),
    }


def read_states_alone(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Layers that are all of Mamba 2."""
    widths = _widths_of_mamba(file, keys)
    if widths["mamba_n_heads"] * widths["mamba_d_head"] % said["hidden_size"]:
        raise GgufError("its layers are no whole number of times as wide as the model, which those of its model are")
    return {
        "num_heads": widths["mamba_n_heads"],
        "head_dim": widths["mamba_d_head"],
        "expand": widths["mamba_n_heads"] * widths["mamba_d_head"] // said["hidden_size"],
        "use_conv_bias": widths["mamba_conv_bias"],
        "use_bias": widths["mamba_proj_bias"],
        "time_step_rank": "auto",  # which files have the number of heads for
    }


def read_periods(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Layers of Mamba of which some have attention instead, and some have experts, each after as many others."""
    layers, inner = range(said["num_hidden_layers"]), keys.get("ssm.inner_size", 0)
    attention = [number for number in layers if f"blk.{number}.attn_output.weight" in file.tensors]
    experts = [number for number in layers if f"blk.{number}.ffn_gate_inp.weight" in file.tensors]
    if not inner or inner % said["hidden_size"]:
        raise GgufError("the file does not say how wide its layers of Mamba are")
    return {
        **_period("attn", attention, len(layers)),
        **_period("expert", experts, len(layers)),
        "num_experts": keys.get("expert_count", 1) if experts else 1,
        "intermediate_size": largest(keys.get("feed_forward_length")),
        "mamba_expand": inner // said["hidden_size"],
        "mamba_d_state": keys.get("ssm.state_size", 16),
        "mamba_d_conv": keys.get("ssm.conv_kernel", 4),
        "mamba_dt_rank": keys.get("ssm.time_step_rank", "auto"),
        "mamba_conv_bias": _any(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _any(file, "ssm_in.bias"),
    }


def _period(kind: str, layers: list[int], count: int) -> dict[str, int]:
    """The first of some layers, and how many there are from one to the next. Raises ``GgufError`` where they are not
    at such places.
    """
    period = layers[1] - layers[0] if len(layers) > 1 else count
    offset = layers[0] if layers else count - 1
    if layers and layers != list(range(offset, count, period)):
        raise GgufError("the layers of a kind in the file do not follow each other at one distance")
    return {f"{kind}_layer_period": period, f"{kind}_layer_offset": offset}


def without_multipliers(config: Any) -> None:
    """Change the configuration of such a model: a file has its weights multiplied already. Raises ``GgufError`` where
    it then computes something else.
    """
    if config.attention_bias and config.attention_in_multiplier != 1:
        raise GgufError("the biases of its attention are multiplied, which those of its model are not")
    tied = config.lm_head_multiplier / config.embedding_multiplier if config.tie_word_embeddings else 1.0
    for name in _MULTIPLIERS:
        setattr(config, name, 1.0)
    config.lm_head_multiplier = tied
    config.mlp_multipliers, config.ssm_multipliers = [1.0] * 2, [1.0] * 5


def _widths_of_mamba(file: GgufFile, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The widths of layers of Mamba 2."""
    inner, count = keys.get("ssm.inner_size"), keys.get("ssm.time_step_rank")
    if not inner or not count or inner % count:
        raise GgufError("the file does not say how wide its layers of Mamba 2 are")
    return {
        "mamba_n_heads": count,
        "mamba_d_head": inner // count,
        "mamba_d_state": keys.get("ssm.state_size", 128),
        "mamba_d_conv": keys.get("ssm.conv_kernel", 4),
        "mamba_n_groups": keys.get("ssm.group_count", 1),
        "mamba_conv_bias": _any(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _any(file, "ssm_in.bias"),
    }


def read_deltas(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Layers without heads for keys have linear attention whose states are changed by differences, and their heads."""
    layers, heads, width = said["num_hidden_layers"], keys.get("attention.head_count_kv"), keys.get("kda.head_dim")
    rates = next((each for name, each in file.tensors.items() if name.endswith(".ssm_beta.weight")), None)
    if not isinstance(heads, list) or len(heads) < layers or not width or rates is None:
        raise GgufError("the file does not say which of its layers have linear attention, and how wide its heads are")
    return {
        "layer_types": ["full_attention" if each else "linear_attention" for each in heads[:layers]],
        "linear_head_dim": width,
        "linear_num_heads": rates.shape[0],
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
    mamba, routed = _widths_of_mamba(file, keys), "moe" in kinds
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
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "use_conv_bias": mamba["mamba_conv_bias"],
        "use_bias": mamba["mamba_proj_bias"],
        "mlp_bias": _any(file, "ffn_up.bias"),
        **(_experts_of(file, keys, kinds.index("moe")) if routed else {}),
    }


def _experts_of(file: GgufFile, keys: Mapping[str, Any], layer: int) -> dict[str, Any]:
    """Settings of experts; of their width older files have the tensors only."""
    up = file.tensors.get(f"blk.{layer}.ffn_up_exps.weight")
    width = {} if up is None else {"moe_intermediate_size": up.shape[1]}
    return {"norm_topk_prob": keys.get("expert_weights_norm", False), **width}


def _kind_of(file: GgufFile, number: int) -> str:
    found = [kind for leaf, kind in _PARTS.items() if f"blk.{number}.{leaf}.weight" in file.tensors]
    if len(found) != 1:
        raise GgufError(f"layer {number} of the file is not of a kind that transformers' model has")
    return found[0]


def _any(file: GgufFile, leaf: str) -> bool:
    """Whether some layer has a tensor of this name."""
    return any(name.endswith(f".{leaf}") for name in file.tensors)
