"""Shapes of tiny models with experts, for GGUF files."""

from __future__ import annotations

from typing import Any

from gguf_widths import (
    EVERY_FOURTH,
    EXPERTS,
    FEW,
    LONGER,
    OLD,
    ROPE,
    ROUTED,
    SCALES,
    SHAPE,
    SINKS,
    TIED,
    TWO_WIDTHS,
    UNNORMED,
    YARN,
)

_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_CHUNKS = {
    **SHAPE,
    **EXPERTS,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "interleave_moe_layer_step": 2,
}
_AVERAGED = {
    **TIED,
    **FEW,
    "num_hidden_layers": 5,
    "head_dim": 32,
    "intermediate_size": 32,
    "prefix_dense_intermediate_size": 96,
    "num_shared_experts": 2,
    "logit_scale": 0.2,
    "sliding_window": 8,
    "expert_selection_fn": "sigmoid",
    "mlp_layer_types": ["dense", *["sparse"] * 4],
    "layer_types": ["full_attention", *EVERY_FOURTH],
}
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
_GATED = {
    **SHAPE,
    **FEW,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_attention_heads_per_layer": [4, 6, 6, 6, 4],
    "head_dim": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "moe_routed_scaling_factor": 1.5,
    "sliding_window": 8,
    "layer_types": ["full_attention", *EVERY_FOURTH],
    "rope_parameters": {
        "full_attention": {**LONGER, "partial_rotary_factor": 0.5},
        "sliding_attention": {**_PLAIN, "partial_rotary_factor": 1.0},
    },
}

# By a label, whose first word is GGUF's name of the architecture.
WITH_EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama experts": ("MixtralConfig", {**SHAPE, **EXPERTS}),
    "qwen3moe": (
        "Qwen3MoeConfig",
        {**SHAPE, **FEW, "head_dim": 32, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "qwen2moe": (
        "Qwen2MoeConfig",
        {**SHAPE, **FEW, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    ),
    "qwen3vlmoe": (
        "Qwen3MoeConfig",
        {**SHAPE, **FEW, "head_dim": 32, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "gemma4 experts": (
        "Gemma4TextConfig",
        {
            **TWO_WIDTHS,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "final_logit_softcapping": 30.0,
        },
    ),
    "granitemoe": ("GraniteMoeConfig", {**SHAPE, **SCALES, **EXPERTS}),
    "granitemoe shared": (
        "GraniteMoeSharedConfig",
        {**SHAPE, **SCALES, **EXPERTS, "shared_intermediate_size": 64},
    ),
    "granite_swa experts": (
        "GraniteMoeSWAConfig",
        {**SHAPE, **SCALES, **SINKS, **EXPERTS, "intermediate_size": 32, "shared_intermediate_size": 64},
    ),
    "olmoe": ("OlmoeConfig", {**SHAPE, **FEW}),
    "glm4moe": (
        "Glm4MoeConfig",
        {
            **SHAPE,
            **ROUTED,
            "num_hidden_layers": 3,
            "head_dim": 32,
            "use_qk_norm": True,
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "rope_parameters": ROPE,
        },
    ),
    "glm4moe whole": (
        "Glm4MoeConfig",
        {
            **SHAPE,
            **ROUTED,
            "n_group": 1,
            "topk_group": 1,
            "intermediate_size": 10944,
            "first_k_dense_replace": 0,
            "head_dim": 32,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0},
        },
    ),
    "deepseek2": (
        "DeepseekV3Config",
        {**SHAPE, **ROUTED, **_LATENT, "num_hidden_layers": 3, "first_k_dense_replace": 1, "rope_parameters": YARN},
    ),
    "deepseek2 softmax": (
        "DeepseekV2Config",
        {**SHAPE, **ROUTED, **_LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy", **UNNORMED},
    ),
    "afmoe": (
        "AfmoeConfig",
        {
            **SHAPE,
            **FEW,
            "num_hidden_layers": 4,
            "num_dense_layers": 1,
            "head_dim": 32,
            "moe_intermediate_size": 32,
            "num_shared_experts": 2,
            "route_scale": 1.5,
            "sliding_window": 8,
            "mup_enabled": True,
        },
    ),
    "hunyuan-moe": ("HunYuanMoEV1Config", {**TIED, **FEW, "head_dim": 16}),
    "ernie4_5-moe": (
        "Ernie4_5_MoeConfig",
        {
            **TIED,
            "num_hidden_layers": 3,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 2,
            "moe_intermediate_size": 32,
            "moe_layer_start_index": 1,
        },
    ),
    "cohere2moe": ("Cohere2MoeConfig", _AVERAGED),
    "cohere2moe softmax": (
        "Cohere2MoeConfig",
        {
            **_AVERAGED,
            "mlp_layer_types": ["sparse"] * 5,
            "prefix_dense_intermediate_size": 32,
            "num_shared_experts": 0,
            "expert_selection_fn": "softmax",
            "rms_norm_eps": 1e-4,
        },
    ),
    "dbrx": (
        "DbrxConfig",
        {
            **OLD,
            "pad_token_id": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "d_model": 64,
            "attn_config": {"clip_qkv": 1.5, "kv_n_heads": 2, "rope_theta": 5000.0},
            "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
            "rope_parameters": {**_PLAIN, "rope_theta": 5000.0},
        },
    ),
    "dots1": (
        "Dots1Config",
        {
            **SHAPE,
            **ROUTED,
            "num_hidden_layers": 3,
            "head_dim": 32,
            "first_k_dense_replace": 1,
            "sliding_window": None,
        },
    ),
    "gpt-oss": ("GptOssConfig", {**SHAPE, **EXPERTS, "head_dim": 16, "sliding_window": 8}),
    "exaone-moe": (
        "ExaoneMoeConfig",
        {
            **SHAPE,
            **FEW,
            "num_hidden_layers": 5,
            "head_dim": 32,
            "moe_intermediate_size": 32,
            "num_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 2,
            "sliding_window": 8,
            "layer_types": [*EVERY_FOURTH, "full_attention"],
        },
    ),
    "hy_v3": (
        "HYV3Config",
        {
            **SHAPE,
            **FEW,
            "num_hidden_layers": 3,
            "head_dim": 32,
            "moe_intermediate_size": 32,
            "num_shared_experts": 2,
            "router_scaling_factor": 1.5,
        },
    ),
    "laguna": ("LagunaConfig", _GATED),
    "laguna whole": (
        "LagunaConfig",
        {
            **_GATED,
            "gating": "per-element",
            "num_attention_heads_per_layer": [6] * 5,
            "mlp_layer_types": [*["dense"] * 3, *["sparse"] * 2],
            "sliding_window": 512,
            "layer_types": ["full_attention"] * 5,
        },
    ),
    "llama4": ("Llama4TextConfig", _CHUNKS),
    "llama4 dense": (
        "Llama4TextConfig",
        {
            **_CHUNKS,
            "num_local_experts": 0,
            "interleave_moe_layer_step": 0,
            "moe_layers": [],
            "no_rope_layers": [1] * 4,
            "layer_types": ["full_attention"] * 4,
        },
    ),
    "mellum": (
        "MellumConfig",
        {
            **SHAPE,
            **FEW,
            "num_hidden_layers": 5,
            "head_dim": 32,
            "moe_intermediate_size": 32,
            "sliding_window": 8,
            "layer_types": ["full_attention", *EVERY_FOURTH],
            "rope_parameters": {"full_attention": LONGER, "sliding_attention": {**_PLAIN, "rope_theta": 5000.0}},
        },
    ),
    "phimoe": ("PhimoeConfig", {**SHAPE, **EXPERTS, "attention_bias": True, "lm_head_bias": True}),
    "minimax-m2": ("MiniMaxM2Config", {**SHAPE, **EXPERTS, "head_dim": 16, "rope_parameters": ROPE}),
}
