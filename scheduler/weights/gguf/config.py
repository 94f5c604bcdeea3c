"""The configuration of a transformers model from the metadata of a GGUF file.

A ``config.json`` beside the file wins, since a file does not say everything: what it leaves out is as the
architecture's configuration class has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from scheduler.gguf_pooling import pooling_of
from scheduler.weights.gguf.architectures import ARCHITECTURES, kind_of
from scheduler.weights.gguf.ends import as_setting, listed, read_ends
from scheduler.weights.gguf.file import GgufFile, largest
from scheduler.weights.gguf.header import GgufError
from scheduler.weights.gguf.hybrid import MULTIPLIED, without_multipliers
from scheduler.weights.gguf.named import damage_told, named_token
from scheduler.weights.gguf.needed import check_needed, check_ropes, check_windows
from scheduler.weights.gguf.special import SPECIAL

_SIZES = ("block_count", "embedding_length")
_PARTS_OF_ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor")
# Keys of the metadata, and what configurations call them: the first name that a configuration has.
_KEYS = {
    "context_length": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "embedding_length": ("hidden_size", "n_embd", "d_model"),
    "block_count": ("num_hidden_layers", "n_layer"),
    "feed_forward_length": (
        "intermediate_size_mlp",
        "prefix_dense_intermediate_size",
        "intermediate_size",
        "ffn_hidden_size",
        "n_inner",
    ),
    "hrm.layers_per_stack": ("num_layers_per_stack",),
    "hrm.h_cycles": ("H_cycles",),
    "hrm.l_cycles": ("L_cycles",),
    "hrm.prefix_lm": ("prefix_lm",),
    "use_parallel_residual": ("use_parallel_residual",),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("v_head_dim",),
    "attention.value_scale": ("attention_value_scale",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "attention.output_group_count": ("o_groups",),
    "attention.output_lora_rank": ("o_lora_rank",),
    "attention.compress_rope_freq_base": ("compress_rope_theta",),
    "hyper_connection.sinkhorn_iterations": ("hc_sinkhorn_iters",),
    "hyper_connection.epsilon": ("hc_eps",),
    "attention.clamp_kqv": ("clip_qkv",),
    "attention.scale": ("attention_multiplier",),
    "altup.active_idx": ("altup_active_idx",),
    "altup.num_inputs": ("altup_num_inputs",),
    "attention.indexer.head_count": ("index_n_heads", "indexer_n_heads"),
    "attention.indexer.key_length": ("index_head_dim", "indexer_head_dim"),
    "attention.indexer.top_k": ("index_topk_blocks", "index_topk", "indexer_budget"),
    "attention.indexer.block_size": ("index_block_size",),
    "attention.indexer.local_blocks": ("index_local_blocks",),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "hyper_connection.count": ("hc_mult", "hc_count"),
    "hyper_connection.magnitude": ("hc_magnitude",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "embedding_scale": ("embedding_multiplier", "embedding_scale"),
    "residual_scale": ("residual_multiplier",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "top_k_experts", "moe_k"),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
    ),
    "moe_latent_size": ("moe_latent_size",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "interleave_moe_layer_step": ("moe_layer_interval", "interleave_moe_layer_step"),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_weights_scale": (
        "routed_scaling_factor",
        "route_scale",
        "router_scaling_factor",
        "moe_routed_scaling_factor",
    ),
    "hyper_connection.low_rank": ("hc_lowrank",),
    "ple.conv_kernel": ("ple_conv_kernel_size",),
    "ple.heads_per_ngram": ("heads_per_ngram",),
    "ple.ngram_size": ("ngram_size",),
    "kda.safe_gate": ("kda_safe_gate",),
    "kda.gate_lower_bound": ("kda_lower_bound",),
    "shortconv.l_cache": ("conv_L_cache",),
    "ssm.conv_kernel": ("conv_kernel", "linear_conv_kernel_dim", "short_conv_kernel_size"),
    "ssm.state_size": ("state_size", "linear_key_head_dim", "ssm_state_size"),
    "ssm.group_count": ("linear_num_key_heads", "n_groups"),
    "ssm.time_step_rank": ("time_step_rank", "linear_num_value_heads"),
    "ssm.inner_size": ("intermediate_size",),
}
_TOKENS = {"bos": "bos_token_id", "padding": "pad_token_id"}
# Settings that the metadata does not say, and tensors that are there if they are on.
_SHOWN = {
    "mlp_bias": "ffn_down.bias",
    "attention_out_bias": "attn_output.bias",
    "use_qk_norm": "attn_q_norm.weight",
}
_SCALES = {"none": "default", "linear": "linear", "yarn": "yarn", "longrope": "longrope"}


def read_gguf_config(file: GgufFile, path: Path) -> Any:
    """The configuration for the model in ``file``, which is at ``path``. The model's own, from a config.json beside it,
    wins, except that the file's ends of replies are added to its own, of which it often has one: only a
    generation_config.json beside the file takes their place. Raises ``GgufError`` where there is none for its
    architecture.
    """
    pooling_of(file.metadata)  # whatever the model is for, a file that does not say it is refused
    own = _read_own(path.parent, file)
    config = own or _derive(file)
    text = config.get_text_config(decoder=True)
    if own is not None:
        own_ends = [end for each in (config, text) for end in listed(getattr(each, "eos_token_id", None))]
        text.eos_token_id = as_setting([*own_ends, *read_ends(file.metadata)])
    if hasattr(text, "quantization_config"):
        del text.quantization_config  # of the checkpoint that the file was made from
    text.tie_word_embeddings = config.tie_word_embeddings = "output.weight" not in file.tensors
    if file.architecture in MULTIPLIED and own is not None:
        without_multipliers(text)
    return text


def _read_own(folder: Path, file: GgufFile) -> Any:
    """The model's own configuration, if it is beside the file and transformers knows a model of that kind by itself;
    None too if only code that comes with the model does, and it can be derived.
    """
    if not (folder / "config.json").is_file():
        return None
    kind = PretrainedConfig.get_config_dict(str(folder))[0].get("model_type")
    if kind not in CONFIG_MAPPING and file.architecture in ARCHITECTURES:
        return None
    return AutoConfig.from_pretrained(str(folder), trust_remote_code=False)


@damage_told("the file does not say, or says wrongly, how its model is built")
def _derive(file: GgufFile) -> Any:
    architecture = file.architecture
    keys = file.keys_of_architecture()
    kind = kind_of(file, keys)
    if any(not isinstance(keys.get(key), int) or keys[key] < 1 for key in _SIZES):
        raise GgufError("the file does not say how many layers its model has, or how wide they are")
    if kind not in CONFIG_MAPPING:
        raise GgufError("transformers has no model of its architecture")
    check_needed(architecture, keys)
    default = CONFIG_MAPPING[kind]()
    said, found = _read_named(keys, default) | _tokens(file, default) | _rope(file, keys, default), dict[str, Any]()
    for special in SPECIAL.get(architecture, ()):
        found |= special(file, keys, said | found)
    if "rope_parameters" in found:  # these are complete
        said = {name: value for name, value in said.items() if name not in _PARTS_OF_ROPE}
        found = {name: value for name, value in found.items() if name not in ("rope_theta", "rope_scaling")}
    said |= found
    config = CONFIG_MAPPING[kind](**said)
    check_windows(keys, said, config)
    check_ropes(keys, config)
    return config


def _read_named(keys: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """What the metadata says, by the configuration's names."""
    said: dict[str, Any] = {}
    for key, names in _KEYS.items():
        name = next((name for name in names if _settable(default, name)), None)
        if key in keys and name is not None:
            said[name] = largest(keys[key])
    if said.get("sliding_window") == 0:
        said["sliding_window"] = None
    scale = next((name for name in _KEYS["expert_weights_scale"] if _settable(default, name)), None)
    if scale is not None and keys.get("expert_count"):
        said.setdefault(scale, 1.0)  # as in llama.cpp, where the file does not say it
    if "attention.key_length" in keys and not hasattr(type(default), "head_dim"):
        said.setdefault("head_dim", keys["attention.key_length"])  # a setting that a configuration need not have
    return said


def _settable(default: Any, name: str) -> bool:
    """Whether a configuration has a setting of this name, and does not compute it."""
    computed = getattr(type(default), name, None)
    there = name in vars(default) or hasattr(default, name)  # where layers differ, to ask for one that does is an error
    return there and not (isinstance(computed, property) and computed.fset is None)


def _tokens(file: GgufFile, default: Any) -> dict[str, Any]:
    """The size of the vocabulary, and the tokens at its ends."""
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise GgufError("the file has no embeddings (token_embd.weight)")
    said: dict[str, Any] = {"vocab_size": table.shape[0]}
    said |= {name: named_token(file.metadata, key) for key, name in _TOKENS.items()}
    said["eos_token_id"] = as_setting(read_ends(file.metadata))
    biased = "blk.0.attn_q.bias" in file.tensors or "blk.0.attn_qkv.bias" in file.tensors
    for name in ("attention_bias", "use_qkv_bias"):
        if hasattr(default, name):
            said[name] = biased
    for name, tensor in _SHOWN.items():
        if hasattr(default, name):
            said[name] = f"blk.0.{tensor}" in file.tensors
    return said


def _rope(file: GgufFile, keys: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """The rotary positions: their base, how much of a head they turn, and how they are stretched."""
    if not hasattr(default, "rope_parameters"):
        return {}
    said: dict[str, Any] = {}
    if "rope.freq_base" in keys:
        said["rope_theta"] = keys["rope.freq_base"]
    heads, width = largest(keys.get("attention.head_count")), keys.get("embedding_length")
    head = keys.get("attention.key_length") or (width // heads if heads and width else None)
    turned = keys.get("rope.dimension_count")
    usual = (default.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    if turned and head and "attention.kv_lora_rank" not in keys and turned / head != usual:
        said["partial_rotary_factor"] = turned / head
    form = _SCALES.get(keys.get("rope.scaling.type", "none"))
    if form is None:
        raise GgufError("its rotary positions are stretched in a way that is not known")
    if form != "default" and not (form == "linear" and keys.get("rope.scaling.factor") == 1):
        said["rope_scaling"] = _read_stretching(file, keys, form)
    return said


def _read_stretching(file: GgufFile, keys: Mapping[str, Any], form: str) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": form}
    for key, name in (
        ("factor", "factor"),
        ("attn_factor", "attention_factor"),
        ("yarn_attn_factor", "attention_factor"),
        ("original_context_length", "original_max_position_embeddings"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if f"rope.scaling.{key}" in keys:
            scaling[name] = keys[f"rope.scaling.{key}"]
    return scaling
