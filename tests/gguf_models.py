"""Tiny random models of many architectures as GGUF files, as llama.cpp's converter would write them.

``scheduler/weights/gguf_names.json`` has the names that the ``gguf`` package gives to the parameters of each of them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
import transformers
from gguf_kit import F32, Q4_0, Q8_0, Stored, byte_tokens, interleaved, store, write_file
from tiny_models import TEMPLATE

NAMES: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "scheduler/weights/gguf_names.json").read_text())
_SHAPE: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "tie_word_embeddings": False,
}
_TIED = {**_SHAPE, "tie_word_embeddings": True}
_OLD: dict[str, Any] = {"vocab_size": 288, "hidden_size": 64, "eos_token_id": 258, "bos_token_id": None}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
_FEW = {"num_experts_per_tok": 2, "num_experts": 4}
_ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
_UNNORMED = {"norm_topk_prob": False}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
_LONGER = {name: value for name, value in _YARN.items() if not name.startswith("mscale")} | {"attention_factor": 1.25}
_GROWING = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_SCALES = {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}
_MAMBA = {
    **_SHAPE,
    **_SCALES,
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "shared_intermediate_size": 64,
    "position_embedding_type": "nope",
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
}
_SINGLE_PARTS = {
    **{name: value for name, value in _SHAPE.items() if name != "num_hidden_layers"},
    "head_dim": 32,
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
}
_PERIODS = {**_SHAPE, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 32}
_PARALLEL = {
    **_SHAPE,
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
_MORE_VALUES = {**_LINEAR, "linear_num_value_heads": 6}
_SECTIONS = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
_TWO_WIDTHS = {
    **_TIED,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "vocab_size_per_layer_input": 288,
}
_EVERY_FOURTH = [*["sliding_attention"] * 3, "full_attention"]
_FALCON: dict[str, Any] = {**_OLD, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False}

# By a label, whose first word is GGUF's name of the architecture.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SHAPE),
    "llama biased": ("LlamaConfig", {**_SHAPE, "attention_bias": True}),
    "llama experts": ("MixtralConfig", {**_SHAPE, **_EXPERTS}),
    "qwen2": ("Qwen2Config", _TIED),
    "qwen3": ("Qwen3Config", {**_SHAPE, "head_dim": 32}),
    "qwen3moe": (
        "Qwen3MoeConfig",
        {**_SHAPE, **_FEW, "head_dim": 32, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "qwen2moe": (
        "Qwen2MoeConfig",
        {**_SHAPE, **_FEW, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    ),
    "qwen2vl": ("Qwen2Config", _TIED),
    "qwen3vl": ("Qwen3Config", {**_SHAPE, "head_dim": 32}),
    "qwen3vlmoe": (
        "Qwen3MoeConfig",
        {**_SHAPE, **_FEW, "head_dim": 32, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "mistral3": ("Ministral3Config", {**_SHAPE, "head_dim": 32, "rope_parameters": _GROWING}),
    "mistral3 plain": ("MistralConfig", {**_SHAPE, "head_dim": 32, "sliding_window": None}),
    "qwen3next": (
        "Qwen3NextConfig",
        {
            **_SHAPE,
            **_FEW,
            **_LINEAR,
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "rope_parameters": _ROPE,
        },
    ),
    "qwen35": (
        "Qwen3_5TextConfig",
        {**_TIED, **_MORE_VALUES, "head_dim": 16, "rope_parameters": {**_ROPE, **_SECTIONS}},
    ),
    "qwen35moe": (
        "Qwen3_5MoeTextConfig",
        {
            **{name: value for name, value in _SHAPE.items() if name != "intermediate_size"},
            **_FEW,
            **_MORE_VALUES,
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "rope_parameters": {**_ROPE, **_SECTIONS},
        },
    ),
    "gemma": ("GemmaConfig", {**_TIED, "head_dim": 16}),
    "gemma2": ("Gemma2Config", {**_TIED, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        {**_TIED, "num_hidden_layers": 7, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            **_TIED,
            "num_hidden_layers": 4,
            "intermediate_size": [96, 96, 128, 128],
            "head_dim": 16,
            "sliding_window": 8,
            "vocab_size_per_layer_input": 288,
            "hidden_size_per_layer_input": 32,
            "num_kv_shared_layers": 2,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.95, 0.0, 0.5, 0.0],
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {**_TWO_WIDTHS, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "gemma4 experts": (
        "Gemma4TextConfig",
        {
            **_TWO_WIDTHS,
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
    "phi2": ("PhiConfig", {**_SHAPE, "num_key_value_heads": 4, "intermediate_size": 256}),
    "phi3": ("Phi3Config", _SHAPE),
    "chatglm": ("GlmConfig", {**_SHAPE, "head_dim": 16}),
    "starcoder2": ("Starcoder2Config", _SHAPE),
    "stablelm": ("StableLmConfig", {**_SHAPE, "use_qkv_bias": True}),
    "granite": ("GraniteConfig", {**_SHAPE, **_SCALES, "logits_scaling": 2.0}),
    "granitemoe": ("GraniteMoeConfig", {**_SHAPE, **_SCALES, **_EXPERTS}),
    "granitehybrid": ("GraniteMoeHybridConfig", {**_MAMBA, **_EXPERTS, "intermediate_size": 32}),
    "granitehybrid dense": (
        "GraniteMoeHybridConfig",
        {**_MAMBA, "num_local_experts": 0, "shared_intermediate_size": 96, "mamba_n_groups": 2},
    ),
    "olmo2": ("Olmo2Config", _SHAPE),
    "olmo2 windows": (
        "Olmo3Config",
        {
            **_SHAPE,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "layer_types": _EVERY_FOURTH,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": _LONGER,
            },
        },
    ),
    "olmoe": ("OlmoeConfig", {**_SHAPE, **_FEW}),
    "command-r": ("CohereConfig", {**_TIED, "logit_scale": 0.2}),
    "cohere2": ("Cohere2Config", {**_TIED, "head_dim": 16, "logit_scale": 0.2, "sliding_window": 8}),
    "glm4": ("Glm4Config", {**_SHAPE, "head_dim": 16}),
    "glm4moe": (
        "Glm4MoeConfig",
        {
            **_SHAPE,
            **_ROUTED,
            "num_hidden_layers": 3,
            "head_dim": 32,
            "use_qk_norm": True,
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "rope_parameters": _ROPE,
        },
    ),
    "deepseek2": (
        "DeepseekV3Config",
        {**_SHAPE, **_ROUTED, **_LATENT, "num_hidden_layers": 3, "first_k_dense_replace": 1, "rope_parameters": _YARN},
    ),
    "deepseek2 softmax": (
        "DeepseekV2Config",
        {**_SHAPE, **_ROUTED, **_LATENT, "q_lora_rank": None, "topk_method": "group_limited_greedy", **_UNNORMED},
    ),
    "smollm3": ("SmolLM3Config", _SHAPE),
    "afmoe": (
        "AfmoeConfig",
        {
            **_SHAPE,
            **_FEW,
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
    "apertus": ("ApertusConfig", {**_SHAPE, "head_dim": 32, "rope_parameters": _DEFAULT_ROPE}),
    "arcee": ("ArceeConfig", {**_SHAPE, "head_dim": 32}),
    "hunyuan-dense": ("HunYuanDenseV1Config", {**_TIED, "head_dim": 32}),
    "hunyuan-moe": ("HunYuanMoEV1Config", {**_TIED, **_FEW, "head_dim": 16}),
    "ernie4_5-moe": (
        "Ernie4_5_MoeConfig",
        {
            **_TIED,
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
            **_SHAPE,
            **_ROUTED,
            "num_hidden_layers": 3,
            "head_dim": 32,
            "first_k_dense_replace": 1,
            "sliding_window": None,
        },
    ),
    "seed_oss biased": (
        "SeedOssConfig",
        {**_SHAPE, "head_dim": 16, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    ),
    "seed_oss": ("SeedOssConfig", {**_SHAPE, "head_dim": 16, "attention_bias": True, "attention_out_bias": False}),
    "nemotron": ("NemotronConfig", _SHAPE),
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
            **_ROUTED,
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
            **_ROUTED,
            **_UNNORMED,
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
        {**_PERIODS, **_FEW, "num_hidden_layers": 5, "expert_layer_period": 2, "expert_layer_offset": 1},
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
    "gpt2": ("GPT2Config", {"vocab_size": 288, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256, **_OLD}),
    "falcon": ("FalconConfig", {**_FALCON, "new_decoder_architecture": False, "multi_query": True}),
    "falcon grouped": ("FalconConfig", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "bloom": ("BloomConfig", {**_OLD, "n_layer": 2, "n_head": 4}),
    "mamba": ("MambaConfig", {**_OLD, "num_hidden_layers": 2}),
    "mamba2": (
        "Mamba2Config",
        {**_OLD, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
    ),
    "olmo": ("OlmoConfig", {**_SHAPE, "clip_qkv": 1.5}),
    "gpt-oss": ("GptOssConfig", {**_SHAPE, **_EXPERTS, "head_dim": 16, "sliding_window": 8}),
    "lfm2": ("Lfm2Config", {**_SHAPE, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "lfm2moe": (
        "Lfm2MoeConfig",
        {
            **_TIED,
            **_FEW,
            "num_hidden_layers": 3,
            "num_dense_layers": 1,
            "moe_intermediate_size": 32,
            "layer_types": ["conv", "full_attention", "conv"],
        },
    ),
    "ernie4_5": ("Ernie4_5Config", {**_SHAPE, "head_dim": 16}),
    "exaone": ("LlamaConfig", {**_TIED, "head_dim": 16}),
    "internlm2": ("LlamaConfig", _SHAPE),
    "minicpm": ("GraniteConfig", {**_TIED, **_SCALES, "attention_multiplier": 0.25, "logits_scaling": 2.0}),
    "exaone-moe": (
        "ExaoneMoeConfig",
        {
            **_SHAPE,
            **_FEW,
            "num_hidden_layers": 5,
            "head_dim": 32,
            "moe_intermediate_size": 32,
            "num_shared_experts": 2,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 2,
            "sliding_window": 8,
            "layer_types": [*_EVERY_FOURTH, "full_attention"],
        },
    ),
    "exaone4": (
        "Exaone4Config",
        {**_SHAPE, "head_dim": 32, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "exaone4 windows": (
        "Exaone4Config",
        {
            **_SHAPE,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        },
    ),
    "minimax-m2": ("MiniMaxM2Config", {**_SHAPE, **_EXPERTS, "head_dim": 16, "rope_parameters": _ROPE}),
}
_WITHOUT_HEAD_WIDTH = (
    "llama",
    "internlm2",
    "minicpm",
    "chatglm",
    "granite",
    "starcoder2",
)  # llama.cpp's converter need not write it
_HYBRID = ("nemotron_h", "nemotron_h_moe")  # each layer of a single part
_PERMUTED = (
    "llama",
    "arcee",
    "granite",
    "granitehybrid",
    "granitemoe",
    "internlm2",
    "minicpm",
    "mistral3",
    "olmo",
    "smollm3",
    *_HYBRID,
)
_ADDED = (
    "gemma",
    "gemma2",
    "gemma3",
    "nemotron",
    "qwen3next",
    "qwen35",
    "qwen35moe",
)  # whose norms are stored as w + 1
_SCALES_IN_LAYERS = {
    ".correct_output_scale": "altup_correct_scale.weight",
    ".mamba.dt_bias": "ssm_dt.bias",
    ".mixer.dt_bias": "ssm_dt.bias",
    ".pre_ff_layernorm.weight": "ffn_norm",
    ".layer_scalar": "layer_output_scale.weight",
    ".router.scale": "ffn_gate_inp.scale",
    ".router.per_expert_scale": "ffn_down_exps.scale",
}
_STACKS = {"altup_projections": "altup_proj.weight", "altup_unembed_projections": "altup_unembd_proj.weight"}
_IN_TURNS = ("qwen35", "qwen35moe")  # heads of values: the first of each head of keys, then the second of each

# Keys of the metadata and the settings that they come from, the first that there is.
_KEYS = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size", "ffn_hidden_size", "n_inner"),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads", "num_attention_heads"),
    "attention.key_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.clamp_kqv": ("clip_qkv",),
    "attention.scale": ("attention_multiplier",),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "expert_count": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_shared_count": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "expert_weights_scale": ("routed_scaling_factor", "route_scale"),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "interleave_moe_layer_step": ("moe_layer_interval",),
    "expert_used_count": ("num_experts_per_tok", "top_k_experts", "moe_k"),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
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
        said["attention.head_count_kv"] = _groups(config)
    if architecture in ("lfm2", "lfm2moe"):
        said["attention.head_count_kv"] = [2 if kind == "full_attention" else 0 for kind in config.layer_types]
    if architecture == "afmoe":
        said["expert_weights_norm"] = True
    if architecture in ("dots1", "exaone-moe"):
        said |= {"expert_weights_norm": config.norm_topk_prob, "expert_gating_func": 2}
    if architecture == "deepseek2":
        said |= _latents(config)
    if architecture in ("qwen3next", *_IN_TURNS):
        said["ssm.inner_size"] = config.linear_num_value_heads * config.linear_value_head_dim
        said["attention.recurrent_layers"] = [kind == "linear_attention" for kind in config.layer_types]
    if architecture == "gemma4":
        said |= _two_widths(config)
    if architecture == "granitehybrid":
        said |= _mamba(config)
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
    if architecture in _HYBRID:
        said |= _single_parts(config, architecture)
    if architecture == "nemotron_h":
        said = {key: value for key, value in said.items() if "expert" not in key}
    if architecture == "gpt-oss":
        said |= _stretched(config.rope_parameters)
    if architecture == "phi3":
        said["attention.sliding_window"] = config.sliding_window or 0
    if label in ("olmo2 windows", "exaone4 windows", "exaone-moe"):
        said["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
    if label == "olmo2 windows":
        said |= _stretched(config.rope_parameters["full_attention"])
        said["rope.scaling.attn_factor"] = config.rope_parameters["full_attention"]["attention_factor"]
    if architecture == "gemma3n":
        said |= _streams(config)
    if label == "mistral3":
        said |= _stretched(config.rope_parameters)
        said["rope.scaling.yarn_log_multiplier"] = config.rope_parameters["mscale_all_dim"]
        said["attention.temperature_scale"] = config.rope_parameters["llama_4_scaling_beta"]
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if "mrope_section" in rope:
        said["rope.dimension_sections"] = [*rope["mrope_section"], 0]
    if "rope_theta" in rope:
        said["rope.freq_base"] = float(rope["rope_theta"])
    part = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if part and architecture != "gemma4":
        said["rope.dimension_count"] = int(part * (getattr(config, "head_dim", None) or 16))
    named = {f"{architecture}.{key}": value for key, value in said.items()}
    template = {"tokenizer.chat_template": TEMPLATE}
    return {"general.architecture": architecture, **named, **byte_tokens(288), **template}


def _setting(config: Any, name: str) -> Any:
    """Of most layers, where they differ."""
    return vars(config)[name] if name in vars(config) else getattr(config, name, None)


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
    if config.q_lora_rank is not None:
        said["attention.q_lora_rank"] = config.q_lora_rank
    if config.norm_topk_prob:
        said |= {"expert_weights_norm": True, "expert_gating_func": 2}
    if config.rope_parameters["rope_type"] == "yarn":
        said |= _stretched(config.rope_parameters)
        said["rope.scaling.yarn_log_multiplier"] = 0.1 * config.rope_parameters["mscale_all_dim"]
    return said


def _stretched(rope: dict[str, Any]) -> dict[str, Any]:
    """What a converter says of rotary positions by YaRN."""
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        "rope.scaling.yarn_beta_slow": rope["beta_slow"],
    }


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
    return {
        "attention.head_count_kv": [2 if kind == "full_attention" else 0 for kind in config.layer_types],
        "rope.scaling.finetuned": False,
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
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


def _unturned(config: Any) -> torch.Tensor:
    """The factors that leave nothing of the frequencies of the part of a head that is not turned."""
    turned = int(16 * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    return torch.tensor([1.0] * turned + [1e30] * (16 - turned))


def _groups(config: Any) -> int:
    """Groups of heads that share keys, where queries, keys and values are one matrix."""
    if getattr(config, "new_decoder_architecture", False):
        return int(config.num_kv_heads)
    return 1 if getattr(config, "multi_query", False) else int(config.num_attention_heads)


def random_model(label: str) -> Any:
    """A model whose every parameter matters."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config_of(label), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".A_log"):
                continue
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.05)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", ".expert_bias")):
                buffer.normal_(0, 0.1)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    return model


@torch.no_grad()
def written(path: Path, label: str, kind: int) -> tuple[Path, Any]:
    """One of ``MODELS`` as a file with blocks of ``kind``, and the model with the dequantised weights."""
    model, architecture = random_model(label), label.partition(" ")[0]
    tensors: dict[str, Stored] = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    numbers: dict[str, list[float]] = {}
    for name, weight in model.state_dict().items():
        if (found := re.search(r"(altup_\w+)\.\d+\.weight", name)) is not None:
            stacks.setdefault(_STACKS[found[1]], []).append(weight)
        elif ".act_fn." in name:
            numbers.setdefault("xielu." + name.rpartition(".")[2], []).append(float(weight))
        elif not (name.startswith("lm_head") and model.config.tie_word_embeddings):
            tensors |= _stored(architecture, model, name, weight, kind)
    for name, weights in stacks.items():
        tensors[name] = store(torch.stack(weights), kind)
        for weight, values in zip(weights, tensors[name].values, strict=True):
            weight.copy_(values)
    if architecture == "gemma4":
        tensors["rope_freqs.weight"] = store(_unturned(model.config))
    return write_file(path, {**metadata_of(label), **numbers}, tensors), model


def _stored(architecture: str, model: Any, name: str, weight: torch.Tensor, kind: int) -> dict[str, Stored]:
    """The tensors of one parameter, which gets the values that they stand for."""
    if ".experts." in name:
        return _experts(architecture, name, weight, kind)
    if name.endswith(tuple(_SCALES_IN_LAYERS)):
        leaf = next(made for end, made in _SCALES_IN_LAYERS.items() if name.endswith(end))
        return {f"blk.{_number(name)}.{leaf}": store(weight)}
    if name.endswith((".router.weight", "e_score_correction_bias", ".expert_bias")) and "mlp.router" not in name:
        leaf = "ffn_gate_inp.weight" if name.endswith("weight") else "exp_probs_b.bias"
        return {f"blk.{_number(name)}.{leaf}": _kept(weight, kind)}
    if "kv_b_proj" in name:
        return _of_latents(model.config, f"blk.{_number(name)}", weight, kind)
    if "shared_mlp" in name and "_linear" in name:
        return _shared(model.config, f"blk.{_number(name)}", name, weight, kind)
    if "in_proj_qkvz" in name:
        return _gated(model.config, f"blk.{_number(name)}", weight, kind)
    base, ending = re.sub(r"\.(weight|bias)$", "", name), re.search(r"\.(weight|bias)$", name)
    found = NAMES[architecture][re.sub(r"\.\d+\.", ".N.", base, count=1)].replace(".N.", f".{_number(name)}.")
    found += ending[0] if ending else ".weight" if base.endswith("sinks") else ""
    if architecture in _IN_TURNS and "linear_attn" in name and not name.endswith("norm.weight"):
        return {found: _in_turns(model.config, name, weight, kind)}
    if name.endswith("A_log"):
        return {found: store(-torch.exp(weight))}
    if weight.dim() == 1 and architecture in _ADDED and name.endswith("norm.weight") and "linear_attn" not in name:
        return {found: store(weight + 1)}
    if weight.dim() == 2 and isinstance(model.get_submodule(base), transformers.pytorch_utils.Conv1D):
        return {found: _kept(weight.t(), kind)}
    if architecture in _PERMUTED and ("q_proj" in name or "k_proj" in name):
        heads = model.config.num_attention_heads if "q_proj" in name else model.config.num_key_value_heads
        return {found: _kept(weight, kind).rows(interleaved(len(weight), heads))}
    if "query_key_value" in name:
        rows = torch.arange(len(weight)).view(_groups(model.config), -1, 16)
        order = torch.cat([rows[:, :-2].flatten(), rows[:, -2].flatten(), rows[:, -1].flatten()])
        return {found: _kept(weight, kind).rows(order)}
    if weight.dim() == 3:
        return {found: store(weight.squeeze(1))}
    if name.endswith(("mamba.D", "mamba.norm.weight", "mixer.norm.weight")) and architecture != "jamba":  # in groups
        groups = getattr(model.config, "mamba_n_groups", None) or model.config.n_groups
        return {found: store(weight.view(groups, -1) if "norm" in name else weight[:, None])}
    return {found: _kept(weight[0] if "shared_expert_gate" in name else weight, kind)}


def _in_turns(config: Any, name: str, weight: torch.Tensor, kind: int) -> Stored:
    """A tensor of linear attention with the first head of values of each head of keys, then the second of each."""
    keys, width = config.linear_num_key_heads, config.linear_value_head_dim
    each = config.linear_num_value_heads // keys

    def turns(width: int) -> torch.Tensor:
        return torch.arange(keys * each * width).view(keys, each, width).transpose(0, 1).flatten()

    if "out_proj" in name:
        stored = store(weight[:, turns(width)], kind)
        weight[:, turns(width)] = stored.values
        return stored
    if name.endswith(("A_log", "dt_bias")):
        return store(-torch.exp(weight) if name.endswith("A_log") else weight).rows(turns(1))
    if "in_proj_a" in name or "in_proj_b" in name:
        return _kept(weight, kind).rows(turns(1))
    if "in_proj_z" in name:
        return _kept(weight, kind).rows(turns(width))
    before = 2 * keys * config.linear_key_head_dim
    order = torch.cat([torch.arange(before), before + turns(width)])
    return (store(weight.squeeze(1)) if "conv1d" in name else _kept(weight, kind)).rows(order)


def _shared(config: Any, layer: str, name: str, weight: torch.Tensor, kind: int) -> dict[str, Stored]:
    """The multilayer perceptron that all layers have, beside experts or alone."""
    beside = "_shexp" if config.num_local_experts else ""
    if "output" in name:
        return {f"{layer}.ffn_down{beside}.weight": _kept(weight, kind)}
    gate, up = weight.chunk(2)
    return {f"{layer}.ffn_gate{beside}.weight": _kept(gate, kind), f"{layer}.ffn_up{beside}.weight": _kept(up, kind)}


def _gated(config: Any, layer: str, weight: torch.Tensor, kind: int) -> dict[str, Stored]:
    """Queries, keys and values of all heads, and their gates: as files of several types have them, of another type if
    the others are of 8 bits.
    """
    heads, key = config.linear_num_key_heads, config.linear_key_head_dim
    value = config.linear_num_value_heads // heads * config.linear_value_head_dim
    kinds = torch.split(torch.arange(len(weight)).view(heads, -1), [key, key, value, value], 1)
    rows, gates = torch.cat([each.flatten() for each in kinds[:3]]), kinds[3].flatten()
    stored = {"qkv": store(weight[rows], kind), "gate": store(weight[gates], Q4_0 if kind == Q8_0 else kind)}
    weight[rows], weight[gates] = stored["qkv"].values, stored["gate"].values
    return {f"{layer}.attn_{name}.weight": each for name, each in stored.items()}


def _of_latents(config: Any, layer: str, weight: torch.Tensor, kind: int) -> dict[str, Stored]:
    """What makes keys of latents, transposed, and what makes values of them, by heads."""
    key, value = config.qk_nope_head_dim, config.v_head_dim
    heads = weight.view(-1, key + value, weight.shape[1])
    stored = {"k": store(heads[:, :key].transpose(1, 2), kind), "v": store(heads[:, key:], kind)}
    heads[:, :key], heads[:, key:] = stored["k"].values.transpose(1, 2), stored["v"].values
    return {f"{layer}.attn_{name}_b.weight": each for name, each in stored.items()}


def _kept(weight: torch.Tensor, kind: int) -> Stored:
    """A tensor to store; the parameter gets its values."""
    stored = store(weight, kind)
    weight.copy_(stored.values)
    return stored


def _experts(architecture: str, name: str, weight: torch.Tensor, kind: int) -> dict[str, Stored]:
    turns, bias = architecture == "gpt-oss", name.endswith("_bias")
    ending = "bias" if bias else "weight"
    whole = weight.transpose(1, 2) if turns and not bias else weight
    layer, kind = f"blk.{_number(name)}", F32 if bias else kind
    if "down_proj" in name:
        return {f"{layer}.ffn_down_exps.{ending}": _kept(whole, kind)}
    if architecture == "gemma4":
        return {f"{layer}.ffn_gate_up_exps.{ending}": _kept(whole, kind)}
    if architecture == "nemotron_h_moe":
        return {f"{layer}.ffn_up_exps.{ending}": _kept(whole, kind)}
    half = whole.shape[1] // 2
    gate, up = (whole[:, ::2], whole[:, 1::2]) if turns else (whole[:, :half], whole[:, half:])
    return {f"{layer}.ffn_gate_exps.{ending}": _kept(gate, kind), f"{layer}.ffn_up_exps.{ending}": _kept(up, kind)}


def _number(name: str) -> str:
    """The number of a parameter's layer."""
    found = re.search(r"\.(\d+)\.", name)
    return found[1] if found else ""
