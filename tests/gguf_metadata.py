"""What llama.cpp's converter says of the models of ``gguf_shapes`` in the metadata of their files."""

from __future__ import annotations

from typing import Any

import transformers
from gguf_kit import byte_tokens
from gguf_layers import (
    compressed,
    deltas,
    doubled_keys,
    head_groups,
    indexed,
    latents,
    mamba,
    nested_parts,
    ngrams,
    ropes_of_layers,
    single_parts,
    streams,
    stretched,
    two_latents,
    two_widths,
    widths_of_mamba,
)
from gguf_shapes import MODELS
from tiny_models import TEMPLATE

_OLD = ("baichuan", "orion", "qwen", "xverse")  # their models are not of transformers
_WITHOUT_HEAD_WIDTH = (
    "llama",
    "internlm2",
    "minicpm",
    "chatglm",
    "granite",
    "granite_swa",
    "starcoder2",
    "bitnet",
    *_OLD,
)  # llama.cpp's converter need not write it
_LISTED = ("cohere2moe", "exaone-moe", "granite_swa", "mellum")  # which of their layers have a window
HYBRID = ("nemotron_h", "nemotron_h_moe")  # each layer of a single part
IN_TURNS = (
    "qwen35",
    "qwen35moe",
    "qwen4exp",
)  # heads of values: the first of each head of keys, then the second of each

# Keys of the metadata and the settings that they come from, the first that there is.
_KEYS = {
    "context_length": ("max_position_embeddings", "max_seq_len"),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": (
        "intermediate_size_mlp",
        "prefix_dense_intermediate_size",
        "intermediate_size",
        "ffn_hidden_size",
        "n_inner",
    ),
    "use_parallel_residual": ("use_parallel_residual",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_attention_heads"),
    "attention.key_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "attention.value_length": ("v_head_dim",),
    "attention.value_scale": ("attention_value_scale",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.output_group_count": ("o_groups",),
    "attention.output_lora_rank": ("o_lora_rank",),
    "attention.compress_rope_freq_base": ("compress_rope_theta",),
    "hyper_connection.count": ("hc_mult", "hc_count"),
    "hyper_connection.sinkhorn_iterations": ("hc_sinkhorn_iters",),
    "hyper_connection.epsilon": ("hc_eps",),
    "attention.clamp_kqv": ("clip_qkv",),
    "attention.scale": ("attention_multiplier",),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "embedding_scale": ("embedding_multiplier", "embedding_scale"),
    "hrm.layers_per_stack": ("num_layers_per_stack",),
    "hrm.h_cycles": ("H_cycles",),
    "hrm.l_cycles": ("L_cycles",),
    "hrm.prefix_lm": ("prefix_lm",),
    "residual_scale": ("residual_multiplier",),
    "attention.indexer.head_count": ("index_n_heads", "indexer_n_heads"),
    "attention.indexer.key_length": ("index_head_dim", "indexer_head_dim"),
    "attention.indexer.top_k": ("index_topk_blocks", "index_topk", "indexer_budget"),
    "attention.indexer.block_size": ("index_block_size",),
    "attention.indexer.local_blocks": ("index_local_blocks",),
    "expert_count": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "expert_weights_scale": (
        "routed_scaling_factor",
        "route_scale",
        "router_scaling_factor",
        "moe_routed_scaling_factor",
    ),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "interleave_moe_layer_step": ("moe_layer_interval", "interleave_moe_layer_step"),
    "expert_used_count": ("num_experts_per_tok", "top_k_experts", "moe_k"),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": (
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
    ),
    "moe_latent_size": ("moe_latent_size",),
    "ssm.conv_kernel": ("conv_kernel", "linear_conv_kernel_dim"),
    "ssm.state_size": ("state_size", "linear_key_head_dim", "ssm_state_size"),
    "ssm.inner_size": ("intermediate_size",),
    "ssm.group_count": ("linear_num_key_heads", "n_groups"),
    "ssm.time_step_rank": ("time_step_rank", "linear_num_value_heads"),
    "shortconv.l_cache": ("conv_L_cache",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
}


def config_of(label: str) -> Any:
    """The configuration of one of ``MODELS``."""
    kind, settings = MODELS[label]
    return getattr(transformers, kind)(**settings)


def metadata_of(label: str) -> dict[str, Any]:
    """What llama.cpp's converter says of the model, and a byte-level tokenizer."""
    architecture, config = label.partition(" ")[0], config_of(label)
    said = {}
    for key, names in _KEYS.items():
        value = next((v for name in names if (v := _setting(config, name)) is not None), None)
        if value is not None:
            said[key] = float(value) if "epsilon" in key or "scale" in key or "capping" in key else value
    if architecture in _WITHOUT_HEAD_WIDTH:
        said.pop("attention.key_length", None)
    if architecture in ("mamba", "mamba2", "lfm2", "lfm2moe"):
        said["attention.layer_norm_rms_epsilon"] = said.pop("attention.layer_norm_epsilon", None) or config.norm_eps
    if architecture == "falcon":
        said["attention.head_count_kv"] = head_groups(config)
    if architecture in ("lfm2", "lfm2moe"):
        said["attention.head_count_kv"] = [2 if kind == "full_attention" else 0 for kind in config.layer_types]
    if architecture in ("afmoe", "hy_v3", "laguna"):
        said["expert_weights_norm"] = True
    if architecture == "hy_v3":
        said["expert_shared_feed_forward_length"] = said.pop("expert_shared_count") * config.moe_intermediate_size
    if architecture in ("laguna", "mellum"):
        said |= ropes_of_layers(config)
    if architecture == "laguna":
        said["attention.head_count"] = config.num_attention_heads_per_layer
    if label == "laguna whole":
        del said["attention.sliding_window"]
    if architecture in ("dots1", "exaone-moe"):
        said |= {"expert_weights_norm": config.norm_topk_prob, "expert_gating_func": 2}
    if architecture == "cohere2moe":
        said |= {
            "expert_feed_forward_length": config.intermediate_size,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_gating_func": 1 if config.expert_selection_fn == "softmax" else 2,
        }
    if architecture == "dbrx":
        said |= nested_parts(config)
    if architecture in ("deepseek2", "deepseek32", "glm-dsa", "hy_v4", "mistral4"):
        said |= latents(config)
    if architecture == "deepseek4":
        said |= compressed(config)
        said.pop("feed_forward_length")
    if architecture == "dots3note":
        said |= latents(config.per_layer_config["indexed_attention"]) | two_latents(config)
    if architecture == "glm-dsa":
        said["attention.indexer.types"] = [kind == "full" for kind in config.indexer_types]
    if architecture == "minicpm3":
        said |= {
            "attention.q_lora_rank": config.q_lora_rank,
            "attention.kv_lora_rank": config.kv_lora_rank,
            "attention.key_length": config.qk_head_dim,
            "rope.dimension_count": config.qk_rope_head_dim,
        }
    if label == "deepseek2 growing":
        rope = config.rope_parameters
        said["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
        said["attention.temperature_length"] = rope["original_max_position_embeddings"]
    if architecture == "hy_v4":
        said |= indexed(config)
        del said["expert_group_count"], said["expert_group_used_count"]
    if architecture in ("qwen3next", *IN_TURNS):
        said["ssm.inner_size"] = config.linear_num_value_heads * config.linear_value_head_dim
        said["attention.recurrent_layers"] = [kind == "linear_attention" for kind in config.layer_types]
    if architecture == "gemma4":
        said |= two_widths(config)
    if label == "glm4moe whole":
        del said["feed_forward_length"], said["leading_dense_block_count"]
    if architecture == "granite_swa":
        said["attention.rope_pattern"] = [bool(base) for base in config.layer_rope_theta]
    if architecture == "granitehybrid":
        said |= mamba(config)
    if architecture == "llama4":
        said["expert_feed_forward_length"] = config.intermediate_size
    if label == "llama4 dense":
        said["attention.sliding_window"] = 0
    if label == "mamba normed":
        said["ssm.dt_b_c_rms"] = True
    if architecture == "mamba2":
        said["ssm.inner_size"] = config.num_heads * config.head_dim
        said["ssm.time_step_rank"] = config.num_heads
    if architecture == "jamba":
        said |= {
            "attention.head_count_kv": [2 if kind == "full_attention" else 0 for kind in config.layer_types],
            "ssm.conv_kernel": config.mamba_d_conv,
            "ssm.state_size": config.mamba_d_state,
            "ssm.inner_size": config.mamba_expand * config.hidden_size,
            "ssm.time_step_rank": config.mamba_dt_rank,
        }
    if architecture == "falcon-h1":
        said |= widths_of_mamba(config) | {"ssm.inner_size": config.mamba_d_ssm}
    if architecture in HYBRID:
        said |= single_parts(config, architecture)
    if architecture == "nemotron_h":
        said = {key: value for key, value in said.items() if "expert" not in key}
    if architecture == "gpt-oss":
        said |= stretched(config.rope_parameters)
    if architecture == "mpt":
        said["attention.max_alibi_bias"] = float(config.attn_config.alibi_bias_max)
        said["attention.clamp_kqv"] = config.attn_config.clip_qkv
    if architecture == "bitnet":
        said |= {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}
    if architecture in _OLD and architecture != "orion":
        del said["attention.head_count_kv"]
    if architecture == "qwen":
        said["feed_forward_length"] = 2 * config.intermediate_size
    if architecture == "phi3":
        said["attention.sliding_window"] = config.sliding_window or 0
    if label in ("olmo2 windows", "exaone4 windows") or architecture in _LISTED:
        said["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
    if label == "olmo2 windows":
        said |= stretched(config.rope_parameters["full_attention"])
        said["rope.scaling.attn_factor"] = config.rope_parameters["full_attention"]["attention_factor"]
    if architecture == "gemma-embedding":  # of tokens on both sides
        said |= {"attention.sliding_window": 2 * (config.sliding_window - 1), "pooling_type": 1}
    if architecture == "gemma3n":
        said |= streams(config)
    if architecture in ("kimi-linear", "bailingmoe3"):
        said |= deltas(config, architecture)
    if architecture == "mimo2":
        said |= doubled_keys(config)
    if architecture == "qwen4exp":
        said |= ngrams(config)
    if architecture == "minimax-m3":
        said |= {
            "feed_forward_length": config.dense_intermediate_size,
            "expert_feed_forward_length": config.intermediate_size,
            "expert_shared_count": config.shared_intermediate_size // config.intermediate_size,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
        }
    if label == "mistral3":
        said |= stretched(config.rope_parameters)
        said["rope.scaling.yarn_log_multiplier"] = config.rope_parameters["mscale_all_dim"]
        said["attention.temperature_scale"] = config.rope_parameters["llama_4_scaling_beta"]
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if "mrope_section" in rope:
        said["rope.dimension_sections"] = [*rope["mrope_section"], 0]
    if "rope_theta" in rope and architecture not in ("gptneox", "minicpm3", "orion"):
        said["rope.freq_base"] = float(rope["rope_theta"])
    if architecture == "hunyuan_vl":
        said |= {"rope.freq_base": 10000.0, "rope.scaling.alpha": 10.0, "rope.dimension_sections": [4, 4, 4, 4]}
    part = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if part and architecture not in ("gemma4", "orion"):
        said["rope.dimension_count"] = int(part * (getattr(config, "head_dim", None) or 16))
    named = {f"{architecture}.{key}": value for key, value in said.items()}
    template = {"tokenizer.chat_template": TEMPLATE}
    return {"general.architecture": architecture, **named, **byte_tokens(288), **template}


def _setting(config: Any, name: str) -> Any:
    """Of most layers, where they differ."""
    return vars(config)[name] if name in vars(config) else getattr(config, name, None)
