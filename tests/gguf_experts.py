"""Shapes of tiny models with experts, for GGUF files."""

from __future__ import annotations

from typing import Any

from gguf_widths import (
    EVERY_FOURTH,
    EXPERTS,
    FEW,
    LATENT,
    ROPE,
    ROUTED,
    SCALES,
    SHAPE,
    TIED,
    TWO_WIDTHS,
    UNNORMED,
    YARN,
)

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
    "deepseek2": (
        "DeepseekV3Config",
        {**SHAPE, **ROUTED, **LATENT, "num_hidden_layers": 3, "first_k_dense_replace": 1, "rope_parameters": YARN},
    ),
    "deepseek2 softmax": (
        "DeepseekV2Config",
        {**SHAPE, **ROUTED, **LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy", **UNNORMED},
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
    "mimo2": (
        "MiMoV2FlashConfig",
        {
            **SHAPE,
            **{name: value for name, value in ROUTED.items() if name != "n_shared_experts"},
            "num_hidden_layers": 4,
            "head_dim": 32,
            "v_head_dim": 16,
            "attention_value_scale": 0.75,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "mlp_layer_types": ["dense", *["sparse"] * 3],
            "rope_parameters": {"full_attention": {**ROPE, "rope_theta": 1000.0}, "sliding_attention": ROPE},
        },
    ),
    "minimax-m2": ("MiniMaxM2Config", {**SHAPE, **EXPERTS, "head_dim": 16, "rope_parameters": ROPE}),
    "minimax-m3": (
        "MiniMaxM3VLTextConfig",
        {
            **SHAPE,
            **EXPERTS,
            "num_hidden_layers": 3,
            "head_dim": 32,
            "rotary_dim": 16,
            "intermediate_size": 32,
            "dense_intermediate_size": 96,
            "shared_intermediate_size": 64,
            "routed_scaling_factor": 1.5,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_block_size": 4,
            "index_topk_blocks": 3,
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": ROPE,
        },
    ),
}
