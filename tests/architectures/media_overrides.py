"""What rules cannot know of models that see or hear, by architecture: settings laid over the shrunk ones."""

from __future__ import annotations

from typing import Any

_SLIDING, _FULL = "sliding_attention", "full_attention"
_PINPOINTS = {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]}


def _axes(*sections: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(sections)}


def _eye(**settings: Any) -> dict[str, Any]:
    return {"vision_config": settings}


def _words(**settings: Any) -> dict[str, Any]:
    return {"text_config": settings}


def _codes(name: str, digits: str, width: int = 1) -> dict[str, int]:
    """The words of a codebook of 64: each has its number in a name."""
    return {name.format("".join(digits[int(d)] for d in f"{code:0{width}}")): 100 + code for code in range(64)}


_SAM = {"downsample_channels": [32, 64], "output_channels": 32, "image_size": 224}
_CODEBOOK = {"num_embeddings": 64}
_LARGER = (
    "idefics3 smolvlm granite_docling internvl qianfan_ocr aya_vision cohere2_vision".split()  # four rows of a picture
)
_THREE_AXES = "glm4v glm46v glmga glm_ocr paddleocr_vl".split()
_MINICPM = {"image_token_id": 199, "video_token_id": 198}
_COMPASS = {"rope_parameters": {_FULL: _axes(2, 3, 3), _SLIDING: _axes(2, 3, 3)}}

# What the default config itself cannot be made without.
BASE: dict[str, dict[str, Any]] = {
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}, "audio_config": {"model_type": "gemma4_audio"}},
    "gemma4_unified": {
        "vision_config": {"model_type": "gemma4_unified_vision"},
        "audio_config": {"model_type": "gemma4_unified_audio"},
    },
    "nemotron_h_omni": {"audio_config": {"num_mel_bins": 80, "projection_hidden_size": 64, "projection_bias": False}},
    "chameleon": {"vq_config": {}},
    "emu3": {"vq_config": {}},
}

OVERRIDES: dict[str, dict[str, Any]] = {
    **{name: _eye(image_size=56) for name in _LARGER},
    **{name: _words(rope_parameters=_axes(2, 3, 3)) for name in _THREE_AXES},
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision"), _PINPOINTS),
    **{name: {"mm_tokens_per_image": 4, **_eye(image_size=56)} for name in ("gemma3", "shieldgemma2")},
    **{name: _eye(window_size=56) for name in ("exaone4_5", "hyperclovax_vision_v2")},
    **{name: _eye(deepstack_visual_indexes=[0, 1]) for name in ("qwen3_vl", "qwen3_vl_moe", "cosmos3_omni")},
    **{name: {"image_token_index": 199, "num_query_tokens": 4} for name in ("blip-2", "instructblip")},
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), _MINICPM),
    **{name: {**_eye(hidden_size=1024), "out_hidden_size": 4096} for name in ("muse_glimmer", "muse_spark")},
    **{name: _eye(image_size=112) for name in ("got_ocr2", "pp_chart2table")},  # of which one row is a 16th
    "aria": {"projector_patch_to_query_dict": {"4": 4}},
    "chameleon": {"vocabulary_map": {"<image>": 250, **_codes("IMGIMG{}Z", "ABCDEFGHIJ")}, "vq_config": _CODEBOOK},
    "cohere_compass": {
        **_words(**_COMPASS, layer_types=[_SLIDING, _FULL] * 2, num_key_value_heads=2, num_hidden_layers=4),
        **_eye(deepstack_visual_indexes=[0, 1]),
    },
    "cosmos3_edge": _words(rope_parameters=_axes(2, 3, 3)),
    "emu3": {
        "vocabulary_map": {"<image>": 250, "<|extra_200|>": 249, **_codes("<|visual token {}|>", "0123456789", 6)},
        "vq_config": {"codebook_size": 64, "hidden_size": 128},
    },
    "deepseek_ocr2": {
        **_words(
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
            num_hidden_layers=4,
            num_experts_per_tok=2,
            n_routed_experts=4,
            moe_intermediate_size=96,
        ),
        **_eye(sam_config=_SAM),
    },
    "unlimited_ocr": _eye(sam_config=_SAM),
    "diffusion_gemma": _words(num_experts=4, top_k_experts=2, moe_intermediate_size=96),
    "dots3_note": {"audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64, "conv_output_size": 256}},
    "ernie4_5_vl_moe": _words(rope_parameters=_axes(3, 3, 2)),
    "fast_vlm": _eye(architecture="fastvit_t8", hidden_size=768),
    "florence2": _eye(projection_dim=64),
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "gemma3n": {
        **_eye(hidden_size=2048),
        "audio_soft_tokens_per_image": 13,
        "audio_config": {"vocab_offset": 257, "vocab_size": 2},
    },
    "gemma4": _words(use_bidirectional_attention="vision"),
    "glm4v_moe": _words(rope_parameters={**_axes(2, 1, 1), "partial_rotary_factor": 0.5}),
    "glm5_next": _words(num_key_value_heads=4, index_kpool=2),
    "granite_docling": _eye(image_size=112),
    "granite4_vision": {
        **_eye(image_size=56),
        "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-2, 0], [-1, 1]],
        "spatial_target_layers": [0, 1, 2, 3],
    },
    "granite_speech": {"window_size": 15},
    "granite_speech_plus": {"window_size": 15},
    "hunyuan_vl": _words(rope_parameters=_axes(2, 3, 3), head_dim=16),
    "inkling2": _eye(text_hidden_size=64),
    "janus": _eye(projection_dim=64),
    "kimi_k25": {"projection_hidden_size": 64, **_words(num_key_value_heads=4, head_dim=8)},
    "llama4": _eye(
        image_size=56, intermediate_size=256, projector_input_dim=64, projector_output_dim=64, vision_output_dim=64
    ),
    "mistral_large4": _words(num_key_value_heads=4),
    "molmo2": {"adapter_config": {"vision_feature_layer": [3, 1]}, "image_token_id": 250, "video_token_id": 249},
    "nemotron_h_omni": {"image_token_id": 250, "video_token_id": 249, "audio_token_id": 248},
    "perception_lm": _eye(
        architecture="vit_pe_core_tiny_patch16_384",
        model_args={"embed_dim": 192, "img_size": [64, 64], "depth": 2, "ref_feat_shape": [4, 4], "global_pool": ""},
    ),
    "paligemma": {"projection_dim": 64, **_eye(image_size=56, projection_dim=64)},
    "phi4_multimodal": {
        **_eye(image_size=28, crop_size=28, patch_size=7, num_hidden_layers=2),
        "audio_config": {"nemo_conv_channels": 16, "num_blocks": 2},
    },
    "qwen2_5_omni_thinker": {
        **_eye(window_size=56),
        **_words(rope_parameters=_axes(2, 3, 3)),
        "audio_config": {"output_dim": 64, "max_source_positions": 64},
    },
    "qwen2_5_vl": {**_eye(window_size=56), **_words(rope_parameters=_axes(2, 3, 3))},
    "qwen2_audio": {"audio_config": {"max_source_positions": 64}},
    "qwen2_vl": {**_eye(embed_dim=64, hidden_size=64, num_heads=4, depth=2), **_words(rope_parameters=_axes(2, 3, 3))},
    "qwen3_asr": {"audio_config": {"output_dim": 64}},
    "qwen3_omni_moe_thinker": {
        **_eye(deepstack_visual_indexes=[0, 1]),
        **_words(rope_parameters=_axes(2, 3, 3)),
        "audio_config": {"output_dim": 64, "max_source_positions": 64},
    },
    "step3p7": _words(sliding_window=8),
    "vipllava": {"vision_feature_layers": [-2, -3, -1, -4, 1]},
    "voxtral": {"audio_config": {"intermediate_size": 256, "max_source_positions": 64}, "audio_token_id": 199},
}

_OMNI = {
    "vision_start_token_id": 151,
    "vision_end_token_id": 152,
    "audio_start_token_id": 153,
    "audio_end_token_id": 154,
}
# Set on a config that is made, as its own class takes them from elsewhere.
TOKENS: dict[str, dict[str, int]] = {"qwen3_omni_moe_thinker": _OMNI, "qwen2_5_omni_thinker": _OMNI}
