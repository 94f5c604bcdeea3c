"""Voxtral's files as Mistral publishes them: a small ``tekken.json``, and no tokenizer of transformers' kind."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import torch
import transformers

AUDIO, BEGIN = 24, 25  # as transformers' processor knows the first
SPECIAL = 40
_NAMED = {
    0: "<unk>",
    1: "<s>",
    2: "</s>",
    3: "[INST]",
    4: "[/INST]",
    5: "[AVAILABLE_TOOLS]",
    6: "[/AVAILABLE_TOOLS]",
    7: "[TOOL_RESULTS]",
    8: "[/TOOL_RESULTS]",
    9: "[TOOL_CALLS]",
    11: "<pad>",
    14: "[PREFIX]",
    15: "[MIDDLE]",
    16: "[SUFFIX]",
    17: "[SYSTEM_PROMPT]",
    18: "[/SYSTEM_PROMPT]",
    19: "[TOOL_CONTENT]",
    AUDIO: "[AUDIO]",
    BEGIN: "[BEGIN_AUDIO]",
    34: "[TRANSCRIBE]",
}
TEMPLATE = (
    "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST]{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{% if part['type'] == \"input_audio\" %}[AUDIO]{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}[/INST]{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
)


def save_tekken(folder: Path, template: str = "") -> None:
    """A vocabulary of bytes. ``template``: laid beside it."""
    words = [{"rank": n, "token_bytes": base64.b64encode(bytes([n])).decode(), "token_str": None} for n in range(256)]
    special = [{"rank": n, "token_str": _NAMED.get(n, f"<SPECIAL_{n}>"), "is_control": True} for n in range(SPECIAL)]
    config = {
        "pattern": r"[^\s]+|\s+",
        "num_vocab_tokens": 256,
        "default_vocab_size": 256 + SPECIAL,
        "default_num_special_tokens": SPECIAL,
        "version": "v7",
    }
    bands = {"num_mel_bins": 128, "hop_length": 160, "window_size": 400}
    hears = {"sampling_rate": 16_000, "frame_rate": 12.5, "audio_encoding_config": bands, "chunk_length_s": 30.0}
    told = {"config": config, "vocab": words, "special_tokens": special, "audio": hears}
    (folder / "tekken.json").write_text(json.dumps(told))
    if template:
        (folder / "chat_template.jinja").write_text(template)


def voxtral(text: dict[str, Any]) -> Any:
    """A model that hears 30 seconds in one piece, of which its encoder makes 375 rows. ``text``: of the decoder."""
    inside = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.VoxtralConfig(
        audio_config={**inside, "num_mel_bins": 128, "max_source_positions": 1500},
        text_config={"model_type": "llama", **text, "vocab_size": 256 + SPECIAL, "bos_token_id": 1, "eos_token_id": 2},
        audio_token_id=AUDIO,
    )
    torch.manual_seed(0)
    return transformers.VoxtralForConditionalGeneration(config).eval()


def save_voxtral(folder: Path, text: dict[str, Any]) -> Any:
    """The files of the model and its processor; returns the model."""
    model = voxtral(text)
    model.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=128).save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "processor_class": "VoxtralProcessor"}))
    save_tekken(folder)
    return model
