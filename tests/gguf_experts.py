"""Shapes of tiny models with experts, for GGUF files."""

from __future__ import annotations

from typing import Any

from gguf_widths import (
    EVERY_FOURTH,
    EXPERTS,
    FEW,
    GROWING,
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

_COMPRESSED = ("compressed_sparse_attention", "heavily_compressed_attention")
_INDEXED = {"index_topk": 8, "index_head_dim": 32, "index_n_heads": 16}

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
    "deepseek32": (
        "DeepseekV32Config",
        {**SHAPE, **ROUTED, **LATENT, **_INDEXED, "first_k_dense_replace": 1, "rope_parameters": YARN},
    ),
    "deepseek4": (
        "DeepseekV4Config",
        {
            **{
                name: value for name, value in SHAPE.items() if name not in ("intermediate_size", "num_key_value_heads")
            },
            "num_hidden_layers": 4,
            "head_dim": 32,
            "partial_rotary_factor": 0.5,
            "q_lora_rank": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
            "swiglu_limit": 0.75,
            "layer_types": ["sliding_attention", *["compressed_sparse_attention", "heavily_compressed_attention"] * 2][
                :4
            ],
            "compress_rates": dict(zip(_COMPRESSED, (4, 8), strict=True)),
            "sliding_window": 8,
            "index_n_heads": 16,
            "index_head_dim": 32,
            "index_topk": 4,
            "o_groups": 2,
            "o_lora_rank": 32,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 3,
            "rope_parameters": {name: value for name, value in YARN.items() if "scale" not in name},
        },
    ),
    "dots3note": (
        "Dots3NoteTextConfig",
        {
            **SHAPE,
            **ROUTED,
            **LATENT,
            **_INDEXED,
            "n_group": 1,
            "topk_group": 1,
            "num_hidden_layers": 3,
            "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
            "sliding_window": 8,
            "head_dim": 16,
            "shared_experts_intermediate_size": 32,
            "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 2,
            "swa_q_lora_rank": 64,
            "swa_kv_lora_rank": 32,
            "swa_head_dim": 32,
            "swa_qk_nope_head_dim": 16,
            "swa_v_head_dim": 64,
        },
    ),
    "glm-dsa": (
        "GlmMoeDsaConfig",
        {
            **SHAPE,
            **ROUTED,
            **LATENT,
            **_INDEXED,
            "n_group": 1,
            "topk_group": 1,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 1,
            "indexer_types": ["full", "full", "shared", "full"],
        },
    ),
    "deepseek2 growing": ("Mistral4Config", {**SHAPE, **ROUTED, **LATENT, "rope_parameters": dict(GROWING)}),
    "mistral4": (
        "Mistral4Config",
        {
            **SHAPE,
            **ROUTED,
            **LATENT,
            **UNNORMED,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "rope_parameters": {**GROWING, "llama_4_scaling_beta": 0.1},
        },
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
    "minimax-m2": ("MiniMaxM2Config", {**SHAPE, **EXPERTS, "head_dim": 16, "rope_parameters": ROPE}),
}
