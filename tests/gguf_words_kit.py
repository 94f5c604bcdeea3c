"""A vocabulary of BERT's kind, as transformers has it and as GGUF files have it."""

from __future__ import annotations

import string
from typing import Any

MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*MARKS, *string.ascii_lowercase, "the", "moon", "!", ",", *(f"##{letter}" for letter in "abcdefgnis"), "##ing"]


def word_tokens() -> dict[str, Any]:
    """Metadata of the tokenizer, as llama.cpp's converter writes it."""
    spelled = [word.removeprefix("##") if word.startswith("##") else "\u2581" + word for word in WORDS[len(MARKS) :]]
    said = {"bos": 2, "eos": 3, "unknown": 1, "seperator": 3, "padding": 0, "cls": 2, "mask": 4}
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "jina-v2-en",
        "tokenizer.ggml.tokens": [*MARKS, *spelled],
        "tokenizer.ggml.token_type": [3] * len(MARKS) + [1] * len(spelled),
        **{f"tokenizer.ggml.{name}_token_id": number for name, number in said.items()},
        "tokenizer.ggml.normalizer.lowercase": True,
    }
