"""Tiny random models that turn speech into text, with a tokenizer and a feature extractor, made on the spot."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tiny_models import byte_tokenizer

RATE = 16_000
SECONDS = 2  # a window
STEPS = 50  # that times are told in
MARKS = ("<|endoftext|>", "<|sot|>", "<|en|>", "<|de|>", "<|transcribe|>", "<|translate|>", "<|prev|>", "<|silence|>")
TIMES = ("<|notime|>", *(f"<|{n * SECONDS / STEPS:.2f}|>" for n in range(STEPS + 1)))
SPEAKING = ("whisper", "moonshine", "speech_to_text")
_IDS: dict[str, Any] = {"pad_token_id": 256, "bos_token_id": 256, "eos_token_id": 256, "decoder_start_token_id": 257}
_VOCABULARY = 256 + len(MARKS) + len(TIMES)


def speech_tokenizer() -> Any:
    """A byte tokenizer with the marks of a speech model."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer([*MARKS, *TIMES]), eos_token=MARKS[0], pad_token=MARKS[0], model_max_length=64
    )


def config_of(name: str) -> Any:
    """The configuration of a tiny model."""
    if name == "moonshine":
        return transformers.MoonshineConfig(
            vocab_size=_VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            encoder_num_hidden_layers=2,
            decoder_num_hidden_layers=2,
            encoder_num_attention_heads=2,
            decoder_num_attention_heads=2,
            max_position_embeddings=64,
            **_IDS,
        )
    shape = {
        "vocab_size": _VOCABULARY,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_target_positions": 64,
        **_IDS,
    }
    if name == "speech_to_text":
        small = {**shape, "pad_token_id": 1}  # positions have a row for it
        return transformers.Speech2TextConfig(**small, input_feat_per_channel=80, conv_channels=32)
    return transformers.WhisperConfig(
        **shape,
        num_mel_bins=80,
        max_source_positions=STEPS * 2,
        begin_suppress_tokens=None,
        suppress_tokens=None,
    )


def extractor_of(name: str) -> Any:
    """What makes features of samples."""
    if name == "moonshine":
        return transformers.Wav2Vec2FeatureExtractor(feature_size=1, do_normalize=False, return_attention_mask=True)
    if name == "speech_to_text":
        return transformers.Speech2TextFeatureExtractor(feature_size=80, num_mel_bins=80)
    return transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=SECONDS)


@cache
def speech_model(name: str) -> Any:
    """A float32 model with random weights of unit gain; nobody may change it."""
    torch.manual_seed(0)
    model = transformers.AutoModelForSpeechSeq2Seq.from_config(config_of(name), dtype=torch.float32).eval()
    with torch.no_grad():
        for label, weight in model.named_parameters():
            if "embed_tokens" in label:
                weight.normal_(0, 1)
            elif weight.ndim >= 2:
                weight.normal_(0, 1.5 / math.sqrt(weight[0].numel()))
    if name == "whisper":
        settings = model.generation_config
        settings.is_multilingual, settings.return_timestamps = True, False
        settings.lang_to_id = {"<|en|>": 258, "<|de|>": 259}
        settings.task_to_id = {"transcribe": 260, "translate": 261}
        settings.prev_sot_token_id, settings.no_timestamps_token_id = 262, 264
        settings.begin_suppress_tokens, settings.suppress_tokens = [256], [257, 258, 259]
        settings.max_initial_timestamp_index, settings.max_length = 10, 64
        settings._from_model_config = False  # else it is made anew when it is read
    return model


def save_speech_model(name: str, folder: Path) -> Path:
    """A folder that ``warmturn serve`` can load."""
    path = folder / name
    speech_model(name).save_pretrained(path)
    speech_tokenizer().save_pretrained(path)
    extractor_of(name).save_pretrained(path)
    return path


def noise(seconds: float, seed: int) -> Any:
    """Samples, float32, as int16 can hold them."""
    made = np.random.default_rng(seed).normal(0, 0.1, round(seconds * RATE)) * np.hanning(round(seconds * RATE))
    return as_float(as_int16(made))


def as_int16(samples: Any) -> bytes:
    """The samples as the server sends them."""
    made: bytes = (np.clip(samples, -1, 1) * 32767).round().astype(np.int16).tobytes()
    return made


def as_float(samples: bytes) -> Any:
    """The samples as a feature extractor takes them."""
    return np.frombuffer(samples, np.int16).astype(np.float32) / 32768
