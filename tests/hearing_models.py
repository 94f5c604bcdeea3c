"""Tiny random models that hear in chats: what ``vision_models`` makes models, tokenizers and processors from."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import transformers

HEARING = ("qwen2_audio", "audioflamingo3", "glmasr")
PHI = "phi4_multimodal"  # has no method that makes rows, and hears otherwise in a prompt with a picture
OTHERS = ("musicflamingo", "qwen3_asr", PHI)  # the first is much like one of these; the others hear a batch's padding
SECONDS = 2  # that their encoders hear at once
MARKS = {
    "qwen2_audio": {"audio_token": "<|AUDIO|>"},
    "audioflamingo3": {"audio_token": "<sound>"},
    "glmasr": {"audio_token": "<|pad|>"},
    "musicflamingo": {
        "audio_token": "<sound>",
        "audio_bos_token": "<|sound_bos|>",
        "audio_eos_token": "<|sound_eos|>",
    },
    "qwen3_asr": {
        "audio_token": "<|audio_pad|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    },
    PHI: {"image_token": "<|image|>", "audio_token": "<|audio|>"},
}
OTHER_MARKS = {"qwen2_audio": ("<|audio_bos|>", "<|audio_eos|>")}
SHOWN = {
    "qwen2_audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
    "audioflamingo3": "<sound>",
    "glmasr": "<|pad|>",
    "musicflamingo": "<sound>",
    "qwen3_asr": "<|audio_start|><|audio_pad|><|audio_end|>",
    PHI: "<|audio|>",
}
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_audio": ("Qwen2AudioProcessor", {}),
    "audioflamingo3": ("AudioFlamingo3Processor", {}),
    "glmasr": ("GlmAsrProcessor", {}),
    "musicflamingo": ("MusicFlamingoProcessor", {}),
    "qwen3_asr": ("Qwen3ASRProcessor", {}),
    PHI: ("Phi4MultimodalProcessor", {}),
}
_EXTRACTOR = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80, "chunk_length": SECONDS}
PREPROCESSORS: dict[str, dict[str, Any]] = dict.fromkeys(HEARING, _EXTRACTOR) | {
    "musicflamingo": _EXTRACTOR,
    "qwen3_asr": {**_EXTRACTOR, "feature_extractor_type": "Qwen3ASRFeatureExtractor"},
    PHI: {
        "image_processor_type": "Phi4MultimodalImageProcessor",
        "feature_extractor_type": "Phi4MultimodalFeatureExtractor",
    },
}
EAR = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "num_mel_bins": 80,
    "max_source_positions": 50 * SECONDS,
}


def config_of(name: str, text: dict[str, Any], token: Callable[[str], int]) -> Any:
    """A tiny configuration. ``text``: of the decoder."""
    mark = token(MARKS[name]["audio_token"])
    words = {"model_type": "qwen2", **text}
    if name == PHI:
        return phi_config(text, mark, token(MARKS[name]["image_token"]))
    if name == "qwen2_audio":
        ear = {"model_type": "qwen2_audio_encoder", **EAR}
        return transformers.Qwen2AudioConfig(audio_config=ear, text_config=words, audio_token_index=mark)
    if name == "qwen3_asr":
        return transformers.Qwen3ASRConfig(
            audio_config={**EAR, "output_dim": 64, "downsample_hidden_size": 16, "max_position_embeddings": 13},
            text_config={"model_type": "qwen3", **text},
            audio_token_id=mark,
            tie_word_embeddings=False,
            eos_token_id=258,
            pad_token_id=256,
        )
    if name in ("audioflamingo3", "musicflamingo"):
        small = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "num_mel_bins": 80,
            "max_source_positions": 50 * SECONDS,
        }
        ear = {"model_type": "audioflamingo3_encoder", **small}
        if name == "musicflamingo":
            ends = (token(MARKS[name][f"audio_{end}_token"]) for end in ("bos", "eos"))
            marks = dict(
                zip(("audio_token_id", "audio_bos_token_id", "audio_eos_token_id"), (mark, *ends), strict=True)
            )
            return transformers.MusicFlamingoConfig(audio_config=ear, text_config=words, **marks)
        return transformers.AudioFlamingo3Config(audio_config=ear, text_config=words, audio_token_id=mark)
    ear = {
        "model_type": "glmasr_encoder",
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_mel_bins": 80,
        "max_position_embeddings": 50 * SECONDS,
    }
    return transformers.GlmAsrConfig(audio_config=ear, text_config={"model_type": "llama", **text}, audio_token_id=mark)


def phi_config(text: dict[str, Any], mark: int, picture: int) -> Any:
    """``text``: of the whole; its parts for sounds and pictures are small."""
    inside = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    channels = {"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 16}
    return transformers.Phi4MultimodalConfig(
        **{key: value for key, value in text.items() if key != "head_dim"},
        original_max_position_embeddings=text["max_position_embeddings"],
        sliding_window=None,
        audio_config={**inside, **channels, "num_blocks": 2, "audio_token_id": mark},
        vision_config={
            **inside,
            "num_hidden_layers": 2,
            "image_size": 28,
            "crop_size": 28,
            "patch_size": 7,
            "image_token_id": picture,
        },
    )


def sound(seconds: float, seed: int, format: str = "WAV", rate: int = 16_000) -> bytes:
    """A file of noise."""
    soundfile = pytest.importorskip("soundfile")
    target = io.BytesIO()
    samples = np.random.default_rng(seed).normal(0, 0.1, round(seconds * rate)).clip(-0.9, 0.9)
    soundfile.write(target, samples, rate, format=format)
    return target.getvalue()
