"""Tiny random models that see, each with a tokenizer, a chat template and a processor of its own, made on the spot."""

from __future__ import annotations

import io
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import hearing_models
import numpy as np
import torch
import transformers
from tiny_models import SHAPE, make_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] != 'text' %}PICTURE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS: dict[str, dict[str, str]] = {  # the tokens that each processor knows by name
    "llava": {"image_token": "<image>"},
    "qwen2_vl": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    "qwen2_5_vl": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    "gemma3": {"image_token": "<image_soft>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    "idefics3": {"image_token": "<image>"},
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
}
OTHER_MARKS: dict[str, tuple[str, ...]] = {
    "qwen2_vl": ("<|vision_start|>", "<|vision_end|>"),
    "qwen2_5_vl": ("<|vision_start|>", "<|vision_end|>"),
    "idefics3": (
        "<fake_token_around_image>",
        "<end_of_utterance>",
        "<global-img>",
        *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)),
    ),
}
SHOWN = {  # what the template writes for a picture
    "llava": "<image>",
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "idefics3": "<image>",
    "internvl": "<IMG_CONTEXT>",
}
SEEING = tuple(SHOWN)
BOTH = "qwen2_5_omni"  # sees and hears
_SQUARE = {"height": 28, "width": 28}
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": (
        "LlavaProcessor",
        {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "qwen2_vl": ("Qwen2VLProcessor", {}),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", {}),
    "gemma3": ("Gemma3Processor", {"image_seq_length": 4}),
    "idefics3": ("Idefics3Processor", {"image_seq_len": 4}),
    "internvl": ("InternVLProcessor", {"image_seq_length": 4}),
}
_PATCHES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 7,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 28 * 28,
    "max_pixels": 56 * 56,
}
PREPROCESSORS: dict[str, dict[str, Any]] = {
    "llava": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28}, "crop_size": _SQUARE},
    "qwen2_vl": _PATCHES,
    "qwen2_5_vl": _PATCHES,
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", "size": _SQUARE},
    "idefics3": {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 56},
        "max_image_size": {"longest_edge": 28},
    },
    "internvl": {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": _SQUARE,
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": 2,
    },
}

_EYE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}

MARKS[BOTH] = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
SHOWN[BOTH] = "<|vision_bos|><|image_pad|><|vision_eos|>"
HEARD = "<|audio_bos|><|audio_pad|><|audio_eos|>"  # what the template writes for a sound of that one
PROCESSORS[BOTH] = ("Qwen2_5OmniProcessor", {})
PREPROCESSORS[BOTH] = {
    **_PATCHES,
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 80,
    "chunk_length": hearing_models.SECONDS,
}
MARKS |= hearing_models.MARKS
OTHER_MARKS |= hearing_models.OTHER_MARKS
SHOWN |= hearing_models.SHOWN
PROCESSORS |= hearing_models.PROCESSORS
PREPROCESSORS |= hearing_models.PREPROCESSORS


def tokenizer_of(name: str) -> Any:
    """The tokenizer of bytes of ``tiny_models``, with the marks of this model behind them."""
    tokenizer = make_tokenizer(*OTHER_MARKS.get(name, ()), *MARKS[name].values(), extra_special_tokens=MARKS[name])
    tokenizer.chat_template = TEMPLATE.replace("PICTURE", SHOWN[name])
    return tokenizer


def config_of(name: str) -> Any:
    """A tiny configuration for the vocabulary of ``tokenizer_of``."""
    tokenizer = tokenizer_of(name)
    text = {**SHAPE, "vocab_size": len(tokenizer)}
    token = tokenizer.convert_tokens_to_ids
    if name in hearing_models.MARKS:
        return hearing_models.config_of(name, text, token)
    image = token(MARKS[name].get("context_image_token") or MARKS[name]["image_token"])
    if name == "llava":
        return transformers.LlavaConfig(
            vision_config={"model_type": "clip_vision_model", **_EYE, "projection_dim": 32},
            text_config={"model_type": "llama", **text},
            image_token_index=image,
            image_seq_length=16,
        )
    if name in ("qwen2_vl", "qwen2_5_vl"):
        kind = {"qwen2_vl": transformers.Qwen2VLConfig, "qwen2_5_vl": transformers.Qwen2_5_VLConfig}[name]
        eye = {"depth": 2, "num_heads": 2, "patch_size": 7, "spatial_merge_size": 2, "temporal_patch_size": 2}
        sizes: dict[str, dict[str, Any]] = {
            "qwen2_vl": {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
            "qwen2_5_vl": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "window_size": 28,
                "fullatt_block_indexes": [1],
            },
        }
        rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
        return kind(
            text_config={**text, "rope_parameters": rope},
            vision_config={**eye, **sizes[name]},
            image_token_id=image,
            video_token_id=token("<|video_pad|>"),
            vision_start_token_id=token("<|vision_start|>"),
            vision_end_token_id=token("<|vision_end|>"),
        )
    if name == BOTH:
        return omni_config(text, token)
    if name == "gemma3":
        return transformers.Gemma3Config(
            text_config={
                **text,
                "num_hidden_layers": 3,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "query_pre_attn_scalar": 16,
            },
            vision_config={"model_type": "siglip_vision_model", **_EYE},
            mm_tokens_per_image=4,
            tie_word_embeddings=False,
            image_token_index=image,
            boi_token_index=token("<start_of_image>"),
            eoi_token_index=token("<end_of_image>"),
        )
    if name == "idefics3":
        return transformers.Idefics3Config(
            text_config={"model_type": "llama", **text},
            vision_config=_EYE,
            scale_factor=2,
            image_token_id=image,
            pad_token_id=256,
        )
    return transformers.InternVLConfig(
        tie_word_embeddings=False,
        text_config={"model_type": "qwen2", **text},
        vision_config={**_EYE, "image_size": [28, 28], "patch_size": [7, 7]},
        image_token_id=image,
        image_seq_length=4,
    )


def omni_config(text: dict[str, Any], token: Any) -> Any:
    """Of the one that sees and hears."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
    eye = {"depth": 2, "num_heads": 2, "patch_size": 7, "spatial_merge_size": 2, "temporal_patch_size": 2}
    wide = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 28}
    ear = {**hearing_models.EAR, "output_dim": 64, "n_window": 25}
    return transformers.Qwen2_5OmniThinkerConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={**eye, **wide, "fullatt_block_indexes": [1]},
        audio_config=ear,
        image_token_index=token("<|image_pad|>"),
        audio_token_index=token("<|audio_pad|>"),
        video_token_index=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_bos|>"),
        vision_end_token_id=token("<|vision_eos|>"),
        audio_start_token_id=token("<|audio_bos|>"),
        audio_end_token_id=token("<|audio_eos|>"),
    )


@cache
def seeing_model(name: str) -> Any:
    """The same model for every test of a run; nobody may change it."""
    return make_seeing_model(name)


def make_seeing_model(name: str) -> Any:
    """A float32 model with random weights of unit gain, so that an error is visible in the logits."""
    torch.manual_seed(0)
    sees = name not in hearing_models.MARKS
    kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForSeq2SeqLM
    kind = transformers.Qwen2_5OmniThinkerForConditionalGeneration if name == BOTH else kind
    kind = transformers.AutoModelForCausalLM if name == hearing_models.PHI else kind
    make = kind._from_config if name == BOTH else kind.from_config
    model = make(config_of(name), dtype=torch.float32).eval()
    with torch.no_grad():
        for label, weight in model.named_parameters():
            if "embed_tokens" in label:
                weight.normal_(0, 1)
            elif weight.ndim >= 2:
                gain = 2 if "q_" in label or "k_" in label else 1
                weight.normal_(0, gain / math.sqrt(weight[0].numel()))
            elif "bias" in label:
                weight.normal_(0, 0.5)
        if name == BOTH:  # its own forward fails where a reply has a mark
            model.lm_head.weight[tokenizer_of(name).convert_tokens_to_ids([*MARKS[name].values()])] = 0
    return model


def save_processor(name: str, folder: Path) -> None:
    """The files of the tokenizer and the processor, as a checkpoint has them."""
    tokenizer_of(name).save_pretrained(folder)
    kind, own = PROCESSORS[name]
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": kind, **own}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"processor_class": kind, **PREPROCESSORS[name]}))


def save_seeing_model(name: str, folder: Path) -> Path:
    """A folder that ``warmturn serve`` can load."""
    path = folder / name
    seeing_model(name).save_pretrained(path)
    save_processor(name, path)
    return path


def picture(width: int, height: int, seed: int) -> bytes:
    """A PNG of random pixels."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
