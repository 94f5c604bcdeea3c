"""Shapes of tiny models that have neither experts nor states, for GGUF files."""

from __future__ import annotations

from typing import Any

from gguf_widths import ENDS, EVERY_FOURTH, GROWING, LATENT, LONGER, OLD, SCALES, SHAPE, SINKS, TIED, TWO_WIDTHS

_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_FALCON: dict[str, Any] = {**OLD, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False}
_EACH_ITS_OWN = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
_ALL_HEADS = {**SHAPE, "num_key_value_heads": 4}
_MPT: dict[str, Any] = {"vocab_size": 288, "d_model": 96, "n_heads": 6, "n_layers": 2, "max_seq_len": 256, **ENDS}

# By a label, whose first word is GGUF's name of the architecture.
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SHAPE),
    "llama biased": ("LlamaConfig", {**SHAPE, "attention_bias": True}),
    "qwen2": ("Qwen2Config", TIED),
    "qwen3": ("Qwen3Config", {**SHAPE, "head_dim": 32}),
    "qwen2vl": ("Qwen2Config", TIED),
    "qwen3vl": ("Qwen3Config", {**SHAPE, "head_dim": 32}),
    "mistral3": ("Ministral3Config", {**SHAPE, "head_dim": 32, "rope_parameters": GROWING}),
    "mistral3 plain": ("MistralConfig", {**SHAPE, "head_dim": 32, "sliding_window": None}),
    "gemma": ("GemmaConfig", {**TIED, "head_dim": 16}),
    "gemma2": ("Gemma2Config", {**TIED, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        {**TIED, "num_hidden_layers": 7, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    ),
    "gemma-embedding": (
        "Gemma3TextConfig",
        {
            **TIED,
            "num_hidden_layers": 7,
            "head_dim": 16,
            "sliding_window": 16,
            "query_pre_attn_scalar": 16,
            "use_bidirectional_attention": True,
        },
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            **TIED,
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
        {**TWO_WIDTHS, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "phi2": ("PhiConfig", {**SHAPE, "num_key_value_heads": 4, "intermediate_size": 256}),
    "phi3": ("Phi3Config", SHAPE),
    "chatglm": ("GlmConfig", {**SHAPE, "head_dim": 16}),
    "starcoder2": ("Starcoder2Config", SHAPE),
    "stablelm": ("StableLmConfig", {**SHAPE, "use_qkv_bias": True}),
    "granite": ("GraniteConfig", {**SHAPE, **SCALES, "logits_scaling": 2.0}),
    "granite_swa": ("GraniteSWAConfig", {**SHAPE, **SCALES, **SINKS}),
    "olmo2": ("Olmo2Config", SHAPE),
    "olmo2 windows": (
        "Olmo3Config",
        {
            **SHAPE,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "layer_types": EVERY_FOURTH,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": LONGER,
            },
        },
    ),
    "command-r": ("CohereConfig", {**TIED, "logit_scale": 0.2}),
    "cohere2": ("Cohere2Config", {**TIED, "head_dim": 16, "logit_scale": 0.2, "sliding_window": 8}),
    "glm4": ("Glm4Config", {**SHAPE, "head_dim": 16}),
    "smollm3": ("SmolLM3Config", SHAPE),
    "apertus": ("ApertusConfig", {**SHAPE, "head_dim": 32, "rope_parameters": _DEFAULT_ROPE}),
    "arcee": ("ArceeConfig", {**SHAPE, "head_dim": 32}),
    "hunyuan-dense": ("HunYuanDenseV1Config", {**TIED, "head_dim": 32}),
    "hunyuan_vl": (
        "HunYuanDenseV1Config",
        {**TIED, "head_dim": 32, "rope_parameters": {**_DEFAULT_ROPE, "rope_theta": 10000.0 * 10.0 ** (32 / 30)}},
    ),
    "baichuan": ("LlamaConfig", _ALL_HEADS),
    "orion": (
        "StableLmConfig",
        {
            **_ALL_HEADS,
            "use_parallel_residual": False,
            "rope_parameters": {**_DEFAULT_ROPE, "partial_rotary_factor": 1.0},
        },
    ),
    "qwen": ("Qwen2Config", _ALL_HEADS),
    "xverse": ("LlamaConfig", _ALL_HEADS),
    "paddleocr": ("LlamaConfig", {**TIED, "head_dim": 32}),
    "seed_oss biased": (
        "SeedOssConfig",
        {**SHAPE, "head_dim": 16, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    ),
    "seed_oss": ("SeedOssConfig", {**SHAPE, "head_dim": 16, "attention_bias": True, "attention_out_bias": False}),
    "nemotron": ("NemotronConfig", SHAPE),
    "gpt2": ("GPT2Config", {"vocab_size": 288, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256, **OLD}),
    "gptneox": ("GPTNeoXConfig", _EACH_ITS_OWN),
    "gptneox sequential": ("GPTNeoXConfig", {**_EACH_ITS_OWN, "use_parallel_residual": False}),
    "hrm_text": (
        "HrmTextConfig",
        {**_EACH_ITS_OWN, "head_dim": 32, "H_cycles": 1, "L_cycles": 2, "embedding_scale": 3.0, "prefix_lm": False},
    ),
    "mpt": ("MptConfig", {**_MPT, "attn_config": {"clip_qkv": 1.5, "alibi_bias_max": 4}}),
    "starcoder": (
        "GPTBigCodeConfig",
        {"vocab_size": 288, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256, "n_inner": 256, **OLD},
    ),
    "falcon": ("FalconConfig", {**_FALCON, "new_decoder_architecture": False, "multi_query": True}),
    "falcon grouped": ("FalconConfig", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "bitnet": ("BitNetConfig", {**TIED, "hidden_act": "silu", "rope_parameters": _DEFAULT_ROPE}),
    "jais2": ("Jais2Config", {**SHAPE, "head_dim": 16}),
    "jais2 unbiased": ("Jais2Config", {**SHAPE, "attention_bias": False, "mlp_bias": False}),
    "bloom": ("BloomConfig", {**OLD, "n_layer": 2, "n_head": 4}),
    "olmo": ("OlmoConfig", {**SHAPE, "clip_qkv": 1.5}),
    "ernie4_5": ("Ernie4_5Config", {**SHAPE, "head_dim": 16}),
    "exaone": ("LlamaConfig", {**TIED, "head_dim": 16}),
    "internlm2": ("LlamaConfig", SHAPE),
    "minicpm": ("GraniteConfig", {**TIED, **SCALES, "attention_multiplier": 0.25, "logits_scaling": 2.0}),
    "minicpm3": ("MiniCPM3Config", {**TIED, **LATENT, "v_head_dim": 64}),
    "exaone4": (
        "Exaone4Config",
        {**SHAPE, "head_dim": 32, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "exaone4 windows": (
        "Exaone4Config",
        {
            **SHAPE,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        },
    ),
}
