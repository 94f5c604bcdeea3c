"""The configuration of a transformers model from the metadata of a GGUF file.

A ``config.json`` beside the file wins, since a file does not say everything: what it leaves out is as the
architecture's configuration class has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig

from scheduler.weights.gguf_file import GgufFile
from scheduler.weights.gguf_header import GgufError

# What GGUF calls an architecture, and transformers' name of its configuration.
ARCHITECTURES = {
    "bloom": "bloom",
    "cohere2": "cohere2",
    "command-r": "cohere",
    "ernie4_5": "ernie4_5",
    "exaone4": "exaone4",
    "falcon": "falcon",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "glm4": "glm4",
    "glm4moe": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "gpt2": "gpt2",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "lfm2": "lfm2",
    "llama": "llama",
    "mamba": "mamba",
    "minimax-m2": "minimax_m2",
    "mistral": "mistral",
    "nemotron": "nemotron",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}
_EXPERTS = {"llama": "mixtral"}  # the same architecture with experts

# Keys of the metadata, and what configurations call them: the first name that a configuration has.
_KEYS = {
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd", "d_model"),
    "block_count": ("num_hidden_layers", "n_layer"),
    "feed_forward_length": ("intermediate_size", "ffn_hidden_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attention.scale": ("attention_multiplier",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_shared_count": ("n_shared_experts",),
    "leading_dense_block_count": ("first_k_dense_replace",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("conv_kernel", "linear_conv_kernel_dim"),
    "ssm.state_size": ("state_size", "linear_key_head_dim"),
    "ssm.group_count": ("linear_num_key_heads",),
    "ssm.time_step_rank": ("time_step_rank", "linear_num_value_heads"),
    "ssm.inner_size": ("intermediate_size",),
}
_TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")  # each of them ends a reply
_SCALES = {"none": "default", "linear": "linear", "yarn": "yarn", "longrope": "longrope"}


def read_gguf_config(file: GgufFile, path: Path) -> Any:
    """The configuration for the model in ``file``, which is at ``path``. Raises ``GgufError`` where there is none for
    its architecture.
    """
    beside = path.parent / "config.json"
    config = AutoConfig.from_pretrained(str(path.parent)) if beside.is_file() else _derive(file)
    text = config.get_text_config(decoder=True)
    if hasattr(text, "quantization_config"):
        del text.quantization_config  # of the checkpoint that the file was made from
    text.tie_word_embeddings = config.tie_word_embeddings = "output.weight" not in file.tensors
    return text


def _derive(file: GgufFile) -> Any:
    architecture = file.architecture
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise GgufError(
            f"its architecture is not one of {known}; for another one that transformers has, put the model's own "
            "config.json beside the file"
        )
    keys = file.keys_of_architecture()
    kind = ARCHITECTURES[architecture]
    if keys.get("expert_count"):
        kind = _EXPERTS.get(architecture, kind)
    if kind not in CONFIG_MAPPING:
        raise GgufError("transformers has no model of its architecture")
    default = CONFIG_MAPPING[kind]()
    said = _read_named(keys, default) | _tokens(file, default) | _rope(file, keys, default)
    for special in _SPECIAL.get(architecture, ()):
        said |= special(file, keys, said)
    return CONFIG_MAPPING[kind](**said)


def _read_named(keys: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """What the metadata says, by the configuration's names."""
    said: dict[str, Any] = {}
    for key, names in _KEYS.items():
        name = next((name for name in names if _settable(default, name)), None)
        if key in keys and name is not None:
            said[name] = _number(keys[key])
    return said


def _settable(default: Any, name: str) -> bool:
    """Whether a configuration has a setting of this name, and does not compute it."""
    computed = getattr(type(default), name, None)
    return hasattr(default, name) and not (isinstance(computed, property) and computed.fset is None)


def _number(value: Any) -> Any:
    """A number for all layers; where there is one for each, the largest (0 is said of layers of another kind)."""
    return max(value) if isinstance(value, list) and value else value


def _tokens(file: GgufFile, default: Any) -> dict[str, Any]:
    """The size of the vocabulary, and the tokens at its ends."""
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise GgufError("the file has no embeddings (token_embd.weight)")
    said: dict[str, Any] = {"vocab_size": table.shape[0]}
    stored = {key: file.metadata.get(f"tokenizer.ggml.{key}") for key in (*_TOKENS, *_ENDS)}
    said |= {name: stored[key] for key, name in _TOKENS.items()}
    ends = list(dict.fromkeys(stored[key] for key in _ENDS if stored[key] is not None))
    if len(ends) > 1:
        said["eos_token_id"] = ends
    biased = "blk.0.attn_q.bias" in file.tensors or "blk.0.attn_qkv.bias" in file.tensors
    for name in ("attention_bias", "use_qkv_bias"):
        if hasattr(default, name):
            said[name] = biased
    for name, tensor in (("mlp_bias", "blk.0.ffn_down.bias"), ("use_qk_norm", "blk.0.attn_q_norm.weight")):
        if hasattr(default, name):
            said[name] = tensor in file.tensors
    return said


def _rope(file: GgufFile, keys: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """The rotary positions: their base, how much of a head they turn, and how they are stretched."""
    if not hasattr(default, "rope_parameters"):
        return {}
    said: dict[str, Any] = {}
    if "rope.freq_base" in keys:
        said["rope_theta"] = keys["rope.freq_base"]
    heads, width = _number(keys.get("attention.head_count")), keys.get("embedding_length")
    head = keys.get("attention.key_length") or (width // heads if heads and width else None)
    turned = keys.get("rope.dimension_count")
    usual = (default.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    if turned and head and turned / head != usual:
        said["partial_rotary_factor"] = turned / head
    if (form := _SCALES.get(keys.get("rope.scaling.type", "none"), "default")) != "default":
        said["rope_scaling"] = _read_stretching(file, keys, form)
    return said


def _read_stretching(file: GgufFile, keys: Mapping[str, Any], form: str) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": form}
    for key, name in (
        ("factor", "factor"),
        ("attn_factor", "attention_factor"),
        ("original_context_length", "original_max_position_embeddings"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if f"rope.scaling.{key}" in keys:
            scaling[name] = keys[f"rope.scaling.{key}"]
    return scaling


def _read_head_scale(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The scores' scale: of the width of a head, in the largest models of the width of all heads by their number."""
    largest = {46: 4608, 62: 5376}
    if largest.get(said["num_hidden_layers"]) == said["hidden_size"]:
        return {"query_pre_attn_scalar": said["hidden_size"] // said["num_attention_heads"]}
    return {"query_pre_attn_scalar": said["head_dim"]}


def _read_normed_choices(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp normalises the weights of the chosen experts unless the file says otherwise."""
    return {"norm_topk_prob": keys.get("expert_weights_norm", True)}


def _layers_with_attention(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """Layers without heads for keys are convolutions."""
    heads = keys.get("attention.head_count_kv")
    if not isinstance(heads, list):
        raise GgufError("the file does not say which of its layers have attention")
    kinds = ["full_attention" if each else "conv" for each in heads]
    return {"layer_types": kinds, "block_auto_adjust_ff_dim": False}


def _read_linear_attention(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
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


def _read_further_layers(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The last layers may be for predicting further tokens, which are not run."""
    return {"num_hidden_layers": said["num_hidden_layers"] - keys.get("nextn_predict_layers", 0)}


def _read_head_width(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """A setting that the configuration need not have."""
    return {"head_dim": keys["attention.key_length"]} if "attention.key_length" in keys else {}


def _read_sections(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The frequencies of a picture's time, height and width, where positions have three numbers."""
    sections = [each for each in keys.get("rope.dimension_sections", ()) if each]
    if not sections:
        return {}
    rope = {name: said[name] for name in ("rope_theta", "partial_rotary_factor") if name in said}
    return {"rope_parameters": {"rope_type": "default", **rope, "mrope_section": sections, "mrope_interleaved": True}}


def _long_factors(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The factors of long contexts, which are tensors in the file."""
    from scheduler.weights.gguf_source import values

    long, short = (file.tensors.get(f"rope_factors_{name}.weight") for name in ("long", "short"))
    if long is None or short is None:
        return {}
    before = keys.get("rope.scaling.original_context_length", said["max_position_embeddings"])
    factors = {"long_factor": values(long).tolist(), "short_factor": values(short).tolist()}
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": before, **factors}
    if "rope.scaling.attn_factor" in keys:
        scaling["attention_factor"] = keys["rope.scaling.attn_factor"]
    return {"rope_scaling": scaling, "original_max_position_embeddings": before}


def _sequential(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors}


def _read_groups(file: GgufFile, keys: Mapping[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """The newer layout with two norms, or the older with one."""
    newer = "blk.0.attn_norm_2.weight" in file.tensors
    heads = _number(keys.get("attention.head_count_kv"))
    return {"new_decoder_architecture": newer, "multi_query": heads == 1, "num_kv_heads": heads, "alibi": False}


_SPECIAL: dict[str, tuple[Any, ...]] = {
    "falcon": (_read_groups,),
    "gemma2": (_read_head_scale,),
    "gemma3": (_read_head_scale,),
    "glm4moe": (_read_further_layers, _read_head_width),
    "lfm2": (_layers_with_attention,),
    "phi3": (_long_factors,),
    "qwen35": (_read_linear_attention, _read_sections),
    "qwen35moe": (_read_linear_attention, _read_sections),
    "qwen3moe": (_read_normed_choices,),
    "qwen3next": (_read_linear_attention,),
    "stablelm": (_sequential,),
}
