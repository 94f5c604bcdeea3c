"""Shapes of tiny models with states, for GGUF files."""

from __future__ import annotations

from typing import Any

from gguf_widths import EXPERTS, FEW, LATENT, OLD, ROPE, ROUTED, SCALES, SHAPE, TIED, UNNORMED

_OF_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
_MAMBA = {
    **SHAPE,
    **SCALES,
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "shared_intermediate_size": 64,
    "position_embedding_type": "nope",
    **_OF_MAMBA,
    "mamba_n_groups": 1,
}
_SINGLE_PARTS = {
    **{name: value for name, value in SHAPE.items() if name != "num_hidden_layers"},
    "head_dim": 32,
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
}
_PERIODS = {**SHAPE, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 32}
_PARALLEL = {
    **SHAPE,
    "head_dim": 32,
    "mamba_d_ssm": 128,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_norm_before_gate": False,
}
_LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
_DELTAS: dict[str, Any] = {
    **{name: value for name, value in SHAPE.items() if name != "num_key_value_heads"},
    **FEW,
    **{name: value for name, value in LATENT.items() if name != "q_lora_rank"},
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
_MORE_VALUES = {**_LINEAR, "linear_num_value_heads": 6}
_SECTIONS = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}

# By a label, whose first word is GGUF's name of the architecture.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3next": (
        "Qwen3NextConfig",
        {
            **SHAPE,
            **FEW,
            **_LINEAR,
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "rope_parameters": ROPE,
        },
    ),
    "qwen35": (
        "Qwen3_5TextConfig",
        {**TIED, **_MORE_VALUES, "head_dim": 16, "rope_parameters": {**ROPE, **_SECTIONS}},
    ),
    "qwen35moe": (
        "Qwen3_5MoeTextConfig",
        {
            **{name: value for name, value in SHAPE.items() if name != "intermediate_size"},
            **FEW,
            **_MORE_VALUES,
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "rope_parameters": {**ROPE, **_SECTIONS},
        },
    ),
    "qwen4exp": (
        "Qwen4ExpTextConfig",
        {
            **{name: value for name, value in SHAPE.items() if name != "intermediate_size"},
            **FEW,
            **_MORE_VALUES,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "hc_count": 3,
            "hc_lowrank": 32,
            "ple_layer_ids": [1],
            "ple_embed_dim": 128,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 53,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
            "output_gate_type": "sigmoid",
            "seed": 5,
            "rope_parameters": {**ROPE, **_SECTIONS},
        },
    ),
    "granitehybrid": ("GraniteMoeHybridConfig", {**_MAMBA, **EXPERTS, "intermediate_size": 32}),
    "granitehybrid dense": (
        "GraniteMoeHybridConfig",
        {**_MAMBA, "num_local_experts": 0, "shared_intermediate_size": 96, "mamba_n_groups": 2},
    ),
    "granitehybrid rotary": (
        "BambaConfig",
        {**SHAPE, "num_hidden_layers": 3, "attn_layer_indices": [1], **_OF_MAMBA, "mamba_n_groups": 2},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **_SINGLE_PARTS,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
        },
    ),
    "nemotron_h biased": (
        "NemotronHConfig",
        {
            **_SINGLE_PARTS,
            "layers_block_type": ["full_attention", "linear_attention", "mlp"],
            "use_conv_bias": False,
            "mlp_bias": True,
        },
    ),
    "nemotron_h_moe": (
        "NemotronHConfig",
        {
            **_SINGLE_PARTS,
            **ROUTED,
            "n_group": 1,
            "topk_group": 1,
            "intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 64,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        },
    ),
    "nemotron_h_moe latent": (
        "NemotronHConfig",
        {
            **_SINGLE_PARTS,
            **ROUTED,
            **UNNORMED,
            "n_group": 1,
            "topk_group": 1,
            "intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 64,
            "moe_latent_size": 32,
            "layers_block_type": ["linear_attention", "full_attention", "moe"],
        },
    ),
    "jamba": (
        "JambaConfig",
        {**_PERIODS, **FEW, "num_hidden_layers": 5, "expert_layer_period": 2, "expert_layer_offset": 1},
    ),
    "jamba dense": (
        "JambaConfig",
        {**_PERIODS, "num_hidden_layers": 4, "num_experts": 1, "expert_layer_period": 4, "expert_layer_offset": 3},
    ),
    "falcon-h1": ("FalconH1Config", _PARALLEL),
    "falcon-h1 normed": (
        "FalconH1Config",
        {**_PARALLEL, "mamba_rms_norm": True, "mamba_n_groups": 1, "mamba_conv_bias": False, "mamba_d_ssm": 64},
    ),
    "mamba": ("MambaConfig", {**OLD, "num_hidden_layers": 2}),
    "mamba normed": ("FalconMambaConfig", {**OLD, "num_hidden_layers": 2, "time_step_rank": 32}),
    "mamba2": (
        "Mamba2Config",
        {**OLD, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
    ),
    "kimi-linear": ("KimiLinearConfig", {**_DELTAS, "linear_head_dim": 16, "linear_num_heads": 2}),
    "bailingmoe3": (
        "BailingHybridConfig",
        {
            **_DELTAS,
            "num_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "head_dim": 16,
            "kda_lower_bound": -3.0,
            "rope_theta": 20000.0,
        },
    ),
    "lfm2": ("Lfm2Config", {**SHAPE, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "lfm2moe": (
        "Lfm2MoeConfig",
        {
            **TIED,
            **FEW,
            "num_hidden_layers": 3,
            "num_dense_layers": 1,
            "moe_intermediate_size": 32,
            "layer_types": ["conv", "full_attention", "conv"],
        },
    ),
}
