"""What llama.cpp's converter says of layers of some kinds: with latents, windows, states or heads of two widths."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

MULTIPLIERS = [11, 101, 1001]  # by which n-grams are hashed: not those that transformers' model computes


def nested_parts(config: Any) -> dict[str, Any]:
    """What a converter says of settings of attention and of experts."""
    return {
        "attention.clamp_kqv": config.attn_config.clip_qkv,
        "attention.head_count_kv": config.attn_config.kv_n_heads,
        "attention.layer_norm_epsilon": 1e-5,
        "feed_forward_length": config.ffn_config.ffn_hidden_size,
        "expert_count": config.ffn_config.moe_num_experts,
        "expert_used_count": config.ffn_config.moe_top_k,
    }


def indexed(config: Any) -> dict[str, Any]:
    """What a converter says of layers that choose what they attend to, and of several streams."""
    return {
        "attention.indexer.types": [kind == "full" for kind in config.indexer_types],
        "hyper_connection.magnitude": config.hc_magnitude,
        "swiglu_clamp_exp": [config.swiglu_limit] * config.num_hidden_layers,
    }


def latents(config: Any) -> dict[str, Any]:
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
        said |= stretched(config.rope_parameters)
        said["rope.scaling.yarn_log_multiplier"] = 0.1 * config.rope_parameters["mscale_all_dim"]
    return said


def compressed(config: Any) -> dict[str, Any]:
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
        **stretched(config.rope_parameters["compress"]),
    }


def two_latents(config: Any) -> dict[str, Any]:
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


def ngrams(config: Any) -> dict[str, Any]:
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


def deltas(config: Any, architecture: str) -> dict[str, Any]:
    """What a converter says of layers that have one head of latents, or linear attention by differences. Of kimi-linear
    it says nothing of groups of experts, and of a part of heads that is turned though none is.
    """
    said = latents(config) | {
        "attention.head_count_kv": [1 if kind == "full_attention" else 0 for kind in config.layer_types],
        "kda.head_dim": config.linear_head_dim,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "expert_gating_func": 2,
    }
    if architecture == "kimi-linear":
        return {key: value for key, value in said.items() if key != "expert_weights_norm"}
    return said | {"kda.safe_gate": config.kda_safe_gate, "kda.gate_lower_bound": config.kda_lower_bound}


def stretched(rope: dict[str, Any]) -> dict[str, Any]:
    """What a converter says of rotary positions by YaRN."""
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        "rope.scaling.yarn_beta_slow": rope["beta_slow"],
    }


def ropes_of_layers(config: Any) -> dict[str, Any]:
    """What a converter says of rotary positions that are stretched in layers without a window."""
    ropes = config.rope_parameters
    said = stretched(ropes["full_attention"])
    said["rope.scaling.yarn_attn_factor"] = ropes["full_attention"]["attention_factor"]
    said["rope.freq_base_swa"] = float(ropes["sliding_attention"]["rope_theta"])
    if "partial_rotary_factor" in ropes["sliding_attention"]:
        said["rope.dimension_count_swa"] = int(config.head_dim * ropes["sliding_attention"]["partial_rotary_factor"])
    return said


def two_widths(config: Any) -> dict[str, Any]:
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


def mamba(config: Any) -> dict[str, Any]:
    """What a converter says of layers of Mamba 2."""
    turned, kinds = config.model_type == "bamba", config.layers_block_type
    width = {} if turned else {"expert_shared_feed_forward_length": config.shared_intermediate_size}
    return {
        "attention.head_count_kv": [2 if kind == "full_attention" else 0 for kind in kinds],
        "rope.scaling.finetuned": turned,
        **width,
        **widths_of_mamba(config),
    }


def widths_of_mamba(config: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
        "ssm.time_step_rank": config.mamba_n_heads,
    }


def single_parts(config: Any, architecture: str) -> dict[str, Any]:
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


def streams(config: Any) -> dict[str, Any]:
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


def doubled_keys(config: Any) -> dict[str, Any]:
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
