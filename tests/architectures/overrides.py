"""What the rules of ``shapes`` cannot know, by architecture: settings laid over the shrunk ones.

Only exceptions: a name without an entry here is built from the rules alone.
"""

from __future__ import annotations

from typing import Any

from architectures.shapes import WINDOW

SLIDING, FULL, LINEAR, HYBRID = "sliding_attention", "full_attention", "linear_attention", "hybrid"
_ALTERNATING = [SLIDING, FULL, SLIDING, FULL]

# Encoders by default: as decoders they are causal and have a cache.
_ENCODERS = (
    "bert bert-generation camembert data2vec-text electra ernie megatron-bert rembert roberta roberta-prelayernorm "
    "roc_bert roformer xlm-roberta xlm-roberta-xl"
).split()
# Multi-head latent attention: the head size of the config is what RoPE turns, and no head is shared.
_LATENT = (
    "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa longcat_flash minicpm3 youtu"
).split()
# Some layers take their K/V from earlier ones.
_SHARED_KV: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL] * 3,
    "num_kv_shared_layers": 2,
}
_SHARED_KV_3N = {
    **_SHARED_KV,
    "intermediate_size": [96] * 6,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
}
_QWEN4_EXP = {
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, "indexed_attention"] * 2,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [1, 3],
    "eos_token_id": 258,
    "hc_count": 2,
}
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}

# What the default config itself cannot be made without.
BASE: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
}

# Entries that are no model by themselves, and why: what transformers says of their tiny configs does not tell it.
_DRAFTS = "drafts for another model, whose hidden states, keys and values all of its layers read"
NO_MODEL = {"gemma4_assistant": _DRAFTS, "gemma4_unified_assistant": _DRAFTS}

OVERRIDES: dict[str | tuple[str, str], dict[str, Any]] = {
    **{name: {"is_decoder": True} for name in _ENCODERS},
    **{name: {"head_dim": 8, "num_key_value_heads": 4} for name in _LATENT},
    "bailing_hybrid": {"num_key_value_heads": 4},
    "bamba": {"attn_layer_indices": [1, 3]},
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},
    "blt": {
        "encoder_config": {"num_hidden_layers": 1, "vocab_size": 260},
        "decoder_config": {"num_hidden_layers": 2, "vocab_size": 260},
        "global_config": {"num_hidden_layers": 2, "hidden_size": 64},
        "patcher_config": {"num_hidden_layers": 2, "vocab_size": 260, "sliding_window": 16},
        "local_attention_window_len": 16,
        "patch_size": 4,
        "vocab_size": 260,
        "num_hidden_layers": 2,  # the config has none, and a cache cannot be made of it without
    },
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "rope_parameters": {FULL: _MROPE, SLIDING: _MROPE},
        "layer_types": _ALTERNATING,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "moe_top_k": 2},
    },
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "deepseek_v2": {"head_dim": 8, "num_key_value_heads": 4, "num_experts_per_tok": 2, "topk_group": 1, "n_group": 1},
    "dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": _ALTERNATING,
        "sliding_window": WINDOW,
        "n_shared_experts": 1,
    },
    "dots3_note": {"text_config": {"num_key_value_heads": 4}},
    "dots3_note_text": {"num_key_value_heads": 4},
    ("encoder-decoder", "s2s"): {"decoder": {"is_decoder": True, "add_cross_attention": True}},
    "falcon_h1": {"num_hidden_layers": 3},
    "gemma3n": {"text_config": _SHARED_KV_3N},
    "gemma3n_text": _SHARED_KV_3N,
    "gemma4": {"text_config": _SHARED_KV},
    "gemma4_text": _SHARED_KV,
    "gemma4_unified": {"text_config": _SHARED_KV},
    "gemma4_unified_text": _SHARED_KV,
    "glm_moe_dsa": {
        "head_dim": 8,
        "num_key_value_heads": 4,
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW, "num_layers": 4},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": [LINEAR, FULL] * 2, "num_hidden_layers": 4},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "inkling_text": {"logits_mup_width_multiplier": 1.0, "use_cache": True},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "kimi_linear": {"num_key_value_heads": 4},
    "laguna": {"layer_types": _ALTERNATING, "num_attention_heads_per_layer": [4, 8, 4, 8]},
    "led": {"attention_window": WINDOW},
    "lfm2": {"num_hidden_layers": 4, "full_attn_idxs": [1, 3], "layer_types": ["conv", FULL] * 2},
    "lfm2_moe": {"layer_types": ["conv", FULL] * 2, "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8, "num_key_value_heads": 4, "num_layers": 2},
    "longt5": {"local_radius": 4, "global_block_size": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mellum": {"layer_types": _ALTERNATING},
    "minimax_m3_vl_text": {
        "layer_types": [FULL, "minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "rotary_dim": 8,
    },
    "ministral": {"head_dim": 16, "layer_types": _ALTERNATING},
    "mllama": {
        "text_config": {"cross_attention_layers": [1], "num_hidden_layers": 4},
        "vision_config": {"intermediate_layers_indices": [0, 1], "num_global_layers": 1},
    },
    "musicgen": {"decoder": {"num_codebooks": 1}},
    "musicgen_melody": {"decoder": {"num_codebooks": 1}},
    "nemo_speechlm": {
        "audio_config": {"diarization_config": {"head_config": {"audio_hidden_size": 64}}},
        "text_config": {"num_key_value_heads": 2},
    },
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": [LINEAR, "moe", FULL, "mlp", LINEAR, FULL]},
    "nllb-moe": {"expert_capacity": 64, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "qwen4_exp": {"text_config": _QWEN4_EXP},
    "qwen4_exp_text": _QWEN4_EXP,
    "recurrent_gemma": {"block_types": ["recurrent", "recurrent", "attention"], "num_hidden_layers": 6},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "max_position_embeddings": 512,
        "attn_layers": ["local", "lsh"] * 2,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "num_hidden_layers": 4,
    },
    "xlm": {"causal": True, "n_langs": 1, "use_lang_emb": False},
    "xlstm": {
        "hidden_size": 128,
        "embedding_dim": 128,
        "num_heads": 4,
        "num_hidden_layers": 3,
        "num_blocks": 3,
        "chunk_size": 8,
    },
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "layers_block_type": [LINEAR, LINEAR, HYBRID, LINEAR, HYBRID],
        "num_hidden_layers": 5,
    },
    "zamba2": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "num_query_groups": 4,
        "kv_channels": 16,
        "layers_block_type": [LINEAR, LINEAR, HYBRID, LINEAR, HYBRID],
        "num_hidden_layers": 5,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "num_mem_blocks": 1,
        "use_mem_rope": True,
    },
}

# Laid over those where thresholds are real: what has no default.
REAL: dict[str, dict[str, Any]] = {
    "qwen4_exp": {"text_config": {"indexer_budget": 256, "indexer_compress_ratio": 4}},
    "qwen4_exp_text": {"indexer_budget": 256, "indexer_compress_ratio": 4},
}

# Code paths of prefill and decode that differ by design (a lower bound on dt in one of them only).
DRIFTING = {"nemotron_h", "nemotron_h_omni", "zamba2", "nemo_speechlm"}


def overlay(settings: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``over`` laid on ``settings``, nested dictionaries key by key."""
    merged = dict(settings)
    for name, value in over.items():
        below = merged.get(name)
        nested = isinstance(value, dict) and isinstance(below, dict)
        merged[name] = overlay(below, value) if nested else value  # type: ignore[arg-type]
    return merged
