"""What llama.cpp's converter says of the models of ``gguf_shapes`` in the metadata of their files."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import transformers
from gguf_kit import byte_tokens
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
MULTIPLIERS = [11, 101, 1001]  # by which n-grams are hashed: not those that transformers' model computes

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
        said |= _ropes_of_layers(config)
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
        said |= _nested_parts(config)
    if architecture in ("deepseek2", "deepseek32", "glm-dsa", "hy_v4", "mistral4"):
        said |= _latents(config)
    if architecture == "deepseek4":
        said |= _compressed(config)
        said.pop("feed_forward_length")
    if architecture == "dots3note":
        said |= _latents(config.per_layer_config["indexed_attention"]) | _two_latents(config)
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
        said |= _indexed(config)
        del said["expert_group_count"], said["expert_group_used_count"]
    if architecture in ("qwen3next", *IN_TURNS):
        said["ssm.inner_size"] = config.linear_num_value_heads * config.linear_value_head_dim
        said["attention.recurrent_layers"] = [kind == "linear_attention" for kind in config.layer_types]
    if architecture == "gemma4":
        said |= _two_widths(config)
    if label == "glm4moe whole":
        del said["feed_forward_length"], said["leading_dense_block_count"]
    if architecture == "granite_swa":
        said["attention.rope_pattern"] = [bool(base) for base in config.layer_rope_theta]
    if architecture == "granitehybrid":
        said |= _mamba(config)
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
        said |= _widths_of_mamba(config) | {"ssm.inner_size": config.mamba_d_ssm}
    if architecture in HYBRID:
        said |= _single_parts(config, architecture)
    if architecture == "nemotron_h":
        said = {key: value for key, value in said.items() if "expert" not in key}
    if architecture == "gpt-oss":
        said |= _stretched(config.rope_parameters)
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
        said |= _stretched(config.rope_parameters["full_attention"])
        said["rope.scaling.attn_factor"] = config.rope_parameters["full_attention"]["attention_factor"]
    if architecture == "gemma-embedding":  # of tokens on both sides
        said["attention.sliding_window"] = 2 * (config.sliding_window - 1)
    if architecture == "gemma3n":
        said |= _streams(config)
    if architecture in ("kimi-linear", "bailingmoe3"):
        said |= _deltas(config, architecture)
    if architecture == "mimo2":
        said |= _doubled_keys(config)
    if architecture == "qwen4exp":
        said |= _ngrams(config)
    if architecture == "minimax-m3":
        said |= {
            "feed_forward_length": config.dense_intermediate_size,
            "expert_feed_forward_length": config.intermediate_size,
            "expert_shared_count": config.shared_intermediate_size // config.intermediate_size,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
        }
    if label == "mistral3":
        said |= _stretched(config.rope_parameters)
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


def _nested_parts(config: Any) -> dict[str, Any]:
    """What a converter says of settings of attention and of experts."""
    return {
        "attention.clamp_kqv": config.attn_config.clip_qkv,
        "attention.head_count_kv": config.attn_config.kv_n_heads,
        "attention.layer_norm_epsilon": 1e-5,
        "feed_forward_length": config.ffn_config.ffn_hidden_size,
        "expert_count": config.ffn_config.moe_num_experts,
        "expert_used_count": config.ffn_config.moe_top_k,
    }


def _indexed(config: Any) -> dict[str, Any]:
    """What a converter says of layers that choose what they attend to, and of several streams."""
    return {
        "attention.indexer.types": [kind == "full" for kind in config.indexer_types],
        "hyper_connection.magnitude": config.hc_magnitude,
        "swiglu_clamp_exp": [config.swiglu_limit] * config.num_hidden_layers,
    }


def _latents(config: Any) -> dict[str, Any]:
    """What a converter says of keys and values that are made of latents, which it stores as those of one head."""
    latent, turned = config.kv_lora_rank, config.qk_rope_head_dim
    said = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + turned,
        "attention.value_length": latent,
        "attention.key_length_mla": config.qk_nope_head_dim + turned,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": turned,
    }
    if (queries := getattr(config, "q_lora_rank", None)) is not None:
        said["attention.q_lora_rank"] = queries
    if getattr(config, "norm_topk_prob", False):
        said |= {"expert_weights_norm": True, "expert_gating_func": 1 if config.model_type == "mistral4" else 2}
    if getattr(config, "rope_parameters", {}).get("rope_type") == "yarn":
        said |= _stretched(config.rope_parameters)
        said["rope.scaling.yarn_log_multiplier"] = 0.1 * config.rope_parameters["mscale_all_dim"]
    return said


def _compressed(config: Any) -> dict[str, Any]:
    """What a converter says of layers that attend to what is compressed."""
    layers = config.num_hidden_layers
    return {
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.compress_ratios": [config.compress_rates.get(kind, 0) for kind in config.layer_types],
        "expert_gating_func": 4,
        "expert_weights_norm": True,
        "swiglu_clamp_exp": [config.swiglu_limit] * layers,
        "swiglu_clamp_shexp": [config.swiglu_limit] * layers,
        "hash_layer_count": config.mlp_layer_types.count("hash_moe"),
        "rope.freq_base": config.rope_parameters["main"]["rope_theta"],
        **_stretched(config.rope_parameters["compress"]),
    }


def _two_latents(config: Any) -> dict[str, Any]:
    """What a converter says of layers with latents of two widths."""
    windowed = [kind == "sliding_attention" for kind in config.layer_types]
    own = config.per_layer_config["sliding_attention"]
    return {
        "attention.head_count": [config.per_layer_config[kind].num_attention_heads for kind in config.layer_types],
        "attention.sliding_window_pattern": windowed,
        "attention.kv_lora_rank_swa": own.kv_lora_rank,
        "attention.key_length_swa": own.kv_lora_rank + own.qk_rope_head_dim,
        "attention.value_length_swa": own.kv_lora_rank,
        "attention.key_length_mla_swa": own.qk_nope_head_dim + own.qk_rope_head_dim,
        "attention.value_length_mla_swa": own.v_head_dim,
        "attention.indexer.types": [not each for each in windowed],
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
        "rope.freq_base": float(config.rope_parameters["indexed_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
    }


def _ngrams(config: Any) -> dict[str, Any]:
    """What a converter says of several streams, of chosen blocks of keys, and of n-grams."""
    sizes = [53, 59, 61, 67]
    return {
        "hyper_connection.low_rank": config.hc_lowrank,
        "attention.compress_ratios": [
            config.indexer_compress_ratio if kind == "indexed_attention" else 0 for kind in config.layer_types
        ],
        "embedding_length_per_layer_input": config.ple_embed_dim // len(sizes),
        "ple.layers": [number - 1 for number in config.ple_layer_ids],
        "ple.ngram_size": config.ngram_size,
        "ple.heads_per_ngram": config.heads_per_ngram,
        "ple.conv_kernel": config.ple_conv_kernel_size,
        "ple.eos_token_id": config.eos_token_id,
        "ple.layer_multipliers": MULTIPLIERS,
        "ple.head_offsets": [0, 53, 112, 173],
        "ple.head_vocab_sizes": sizes,
    }


def _deltas(config: Any, architecture: str) -> dict[str, Any]:
    """What a converter says of layers that have one head of latents, or linear attention by differences. Of kimi-linear
    it says nothing of groups of experts, and of a part of heads that is turned though none is.
    """
    said = _latents(config) | {
        "attention.head_count_kv": [1 if kind == "full_attention" else 0 for kind in config.layer_types],
        "kda.head_dim": config.linear_head_dim,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "expert_gating_func": 2,
    }
    if architecture == "kimi-linear":
        return {key: value for key, value in said.items() if key != "expert_weights_norm"}
    return said | {"kda.safe_gate": config.kda_safe_gate, "kda.gate_lower_bound": config.kda_lower_bound}


def _stretched(rope: dict[str, Any]) -> dict[str, Any]:
    """What a converter says of rotary positions by YaRN."""
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        "rope.scaling.yarn_beta_slow": rope["beta_slow"],
    }


def _ropes_of_layers(config: Any) -> dict[str, Any]:
    """What a converter says of rotary positions that are stretched in layers without a window."""
    ropes = config.rope_parameters
    said = _stretched(ropes["full_attention"])
    said["rope.scaling.yarn_attn_factor"] = ropes["full_attention"]["attention_factor"]
    said["rope.freq_base_swa"] = float(ropes["sliding_attention"]["rope_theta"])
    if "partial_rotary_factor" in ropes["sliding_attention"]:
        said["rope.dimension_count_swa"] = int(config.head_dim * ropes["sliding_attention"]["partial_rotary_factor"])
    return said


def _two_widths(config: Any) -> dict[str, Any]:
    """What a converter says of layers with heads of two widths."""
    windowed = [kind == "sliding_attention" for kind in config.layer_types]
    own = config.num_hidden_layers - config.num_kv_shared_layers
    wide = 2 if config.use_double_wide_mlp else 1
    full = config.per_layer_config[1]
    few = full.num_key_value_heads
    return {
        "attention.sliding_window_pattern": windowed,
        "attention.key_length": full.head_dim,
        "attention.key_length_swa": config.per_layer_config[0].head_dim,
        "attention.head_count_kv": [
            config.per_layer_config[0].num_key_value_heads if each else few for each in windowed
        ],
        "feed_forward_length": [
            config.intermediate_size * (1 if number < own else wide) for number in range(len(windowed))
        ],
        "rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": config.per_layer_config[0].head_dim,
    }


def _mamba(config: Any) -> dict[str, Any]:
    """What a converter says of layers of Mamba 2."""
    turned, kinds = config.model_type == "bamba", config.layers_block_type
    width = {} if turned else {"expert_shared_feed_forward_length": config.shared_intermediate_size}
    return {
        "attention.head_count_kv": [2 if kind == "full_attention" else 0 for kind in kinds],
        "rope.scaling.finetuned": turned,
        **width,
        **_widths_of_mamba(config),
    }


def _widths_of_mamba(config: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
        "ssm.time_step_rank": config.mamba_n_heads,
    }


def _single_parts(config: Any, architecture: str) -> dict[str, Any]:
    """What a converter says of layers that are attention, a multilayer perceptron, experts, or Mamba 2."""
    kinds = config.layers_block_type
    routed = {} if architecture == "nemotron_h" else {"expert_weights_norm": config.norm_topk_prob}
    return {
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "attention.head_count_kv": [2 if kind == "full_attention" else 0 for kind in kinds],
        "feed_forward_length": [config.intermediate_size if kind in ("moe", "mlp") else 0 for kind in kinds],
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads,
        **routed,
    }


def _streams(config: Any) -> dict[str, Any]:
    """What a converter says of layers that keep several versions of what they compute."""
    return {
        "altup.active_idx": config.altup_active_idx,
        "altup.num_inputs": config.altup_num_inputs,
        "activation_sparsity_scale": [
            NormalDist().inv_cdf(part) if part else float("-inf") for part in config.activation_sparsity_pattern
        ],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        "rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
    }


def _doubled_keys(config: Any) -> dict[str, Any]:
    """What a converter says of layers with a window that have twice as many heads of keys, beside three further layers
    that it counts. Of the window it says one less than transformers' model has.
    """
    windowed = [kind == "sliding_attention" for kind in config.layer_types] + [True] * 3
    return {
        "block_count": len(windowed),
        "nextn_predict_layers": 3,
        "expert_gating_func": 2,
        "attention.head_count_kv": [config.num_key_value_heads * (2 if each else 1) for each in windowed],
        "attention.sliding_window": config.sliding_window - 1,
        "attention.sliding_window_pattern": [int(each) for each in windowed],
        "rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
    }


def head_groups(config: Any) -> int:
    """Groups of heads that share keys, where queries, keys and values are one matrix."""
    if getattr(config, "new_decoder_architecture", False):
        return int(config.num_kv_heads)
    return 1 if getattr(config, "multi_query", False) else int(config.num_attention_heads)
