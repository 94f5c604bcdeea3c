"""The tokenizer of a GGUF file with the vocabulary of BERT: the tokens of transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf_kit import write_file
from gguf_words_kit import WORDS, word_tokens
from transformers import BertTokenizerFast

from scheduler.weights.gguf_header import GgufError
from scheduler.weights.gguf_tokenizer import read_gguf_tokenizer

TEXTS = ("the moons, far!", "The Moons\u00e9 \u6708 is!", "[MASK]ing the  [SEP] xyz", "A\u030abc \t sing", "")


def tokenizer_of(path: Path, **said: object) -> Any:
    """Of a file that says this too; None for what it does not say."""
    metadata = {"general.architecture": "bert", **word_tokens(), **said}
    return read_gguf_tokenizer(write_file(path, {key: each for key, each in metadata.items() if each is not None}, {}))


def own(lower: bool, accents: bool | None = None) -> Any:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    return BertTokenizerFast(vocab=vocabulary, do_lower_case=lower, strip_accents=accents)


@pytest.mark.parametrize(("lower", "accents"), [(True, None), (False, None), (True, False)])
def test_texts_are_the_tokens_of_the_models_own_tokenizer(lower: bool, accents: bool | None, tmp_path: Path) -> None:
    said = {"tokenizer.ggml.normalizer.lowercase": lower, "tokenizer.ggml.normalizer.strip_accents": accents}
    mine, theirs = tokenizer_of(tmp_path / "x.gguf", **said), own(lower, accents)
    for text in TEXTS:
        assert mine.encode(text) == theirs.encode(text), text
    ids = theirs.encode("moons sing")
    assert mine.decode(ids, skip_special_tokens=True) == "moons sing"
    assert (mine.pad_token, mine.unk_token) == ("[PAD]", "[UNK]")


def test_what_older_files_do_not_say(tmp_path: Path) -> None:
    """Ends by their other names, and capitals by those of the vocabulary."""
    unsaid = dict.fromkeys(("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"))
    unsaid |= {"tokenizer.ggml.normalizer.lowercase": None}
    assert tokenizer_of(tmp_path / "x.gguf", **unsaid).encode("The moon") == own(True).encode("The moon")
    tokens = list(word_tokens()["tokenizer.ggml.tokens"])
    tokens[5] = "\u2581The"
    cased = tokenizer_of(tmp_path / "y.gguf", **unsaid, **{"tokenizer.ggml.tokens": tokens})
    assert cased.encode("The moon") == [2, 5, 32, 3]


def test_a_vocabulary_without_the_tokens_that_are_needed(tmp_path: Path) -> None:
    for name, told in (("unknown", "what is unknown"), ("cls", "before and behind a text")):
        unsaid: dict[str, object] = {f"tokenizer.ggml.{name}_token_id": None}
        if name == "cls":
            unsaid["tokenizer.ggml.bos_token_id"] = None
        with pytest.raises(GgufError, match=told):
            tokenizer_of(tmp_path / "x.gguf", **unsaid)
