"""How text is split before the merges of a vocabulary in a GGUF file, and what it begins with."""

from __future__ import annotations

from typing import Any

import pytest
from gguf_kit import byte_tokens
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from scheduler.weights.gguf_header import GgufError
from scheduler.weights.gguf_splits import _OF_GPT2, _SPLITS
from scheduler.weights.gguf_tokenizer import _convert

TEXT = "I don't DON'T (foo) x.\n\n12345 a1 \u6771\u4eac"
GPT2 = ["I", "\u0120don", "'t", "\u0120DON", "'", "T", "\u0120(", "foo", ")", "\u0120x", "."]
LLAMA3 = ["I", "\u0120don", "'t", "\u0120DON", "'T", "\u0120(", "foo", ")", "\u0120x", ".\u010a\u010a"]
TOKYO = "\u00e6\u013f\u00b1\u00e4\u00ba\u00ac"  # the bytes of two letters
PIECES = {  # as the expressions say, by hand
    "gpt-2": [*GPT2, "\u010a", "\u010a", "12345", "\u0120a", "1", f"\u0120{TOKYO}"],
    "smollm": [*GPT2, "\u010a\u010a", *"12345", "\u0120a", "1", f"\u0120{TOKYO}"],
    "glm4": [*LLAMA3, "123", "45", "\u0120a", "1", f"\u0120{TOKYO}"],
    "hunyuan": [*LLAMA3, *"12345", "\u0120a", "1", f"\u0120{TOKYO}"],
    "deepseek-v3": [
        *("I", "\u0120don", "'t", "\u0120DON", "'T", "\u0120(", "foo", ")", "\u0120x", ".\u010a\u010a", "123", "45"),
        *("\u0120a", "1", "\u0120", TOKYO),
    ],
    "afmoe": [
        *("I", "\u0120don", "'t", "\u0120DON", "'T", "\u0120(", "foo", ")", "\u0120x", ".\u010a\u010a", "12", "345"),
        *("\u0120a", "1", "\u0120", TOKYO),
    ],
    "exaone-moe": [
        *("I\u0120don", "'t", "\u0120DON", "'T", "\u0120(", "foo", ")", "\u0120x", ".\u010a", "\u010a", *"12345"),
        *("\u0120a", "1", f"\u0120{TOKYO}"),
    ],
}


def converted(**said: Any) -> Any:
    return _convert({"general.architecture": "llama", **byte_tokens(), **said})


def pieces(name: str) -> list[str]:
    found = converted(**{"tokenizer.ggml.pre": name}).backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    return [piece for piece, _ in found]


@pytest.mark.parametrize("name", PIECES)
def test_text_is_split_as_the_name_says(name: str) -> None:
    assert pieces(name) == PIECES[name]


@pytest.mark.parametrize("name", sorted({*_SPLITS, *_OF_GPT2, *GGUF_PRE_TOKENIZER_SPLITS}))
def test_nothing_of_a_text_is_lost(name: str) -> None:
    assert "".join(pieces(name)) == "".join(pieces("gpt-2"))


def test_each_name_is_known_once() -> None:
    assert not _SPLITS.keys() & _OF_GPT2
    assert not GGUF_PRE_TOKENIZER_SPLITS.keys() & (_SPLITS.keys() | _OF_GPT2)
    differing = [name for name in _SPLITS if pieces(name) == PIECES["gpt-2"]]
    assert not differing


def test_a_name_that_nobody_knows_is_refused() -> None:
    with pytest.raises(GgufError, match=r"tokenizer\.json beside the file"):
        pieces("of next year")


@pytest.mark.parametrize(("said", "first"), [(None, "\u2581hi"), (True, "\u2581hi"), (False, "hi")])
def test_a_text_begins_with_a_space_unless_the_file_says_otherwise(said: bool | None, first: str) -> None:
    words = [f"<0x{number:02X}>" for number in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *words, "\u2581", "h", "i", "hi", "\u2581hi"]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-10.0, -11.0, -12.0, -1.0, -2.0],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 5],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        **({} if said is None else {"tokenizer.ggml.add_space_prefix": said}),
    }
    tokenizer = _convert(metadata)
    ids = tokenizer("hi hi", add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == [first, "\u2581hi"]
    assert tokenizer.decode(ids) == "hi hi"
    if said is False:
        assert tokenizer.decode(tokenizer(" hi", add_special_tokens=False).input_ids) == " hi"
