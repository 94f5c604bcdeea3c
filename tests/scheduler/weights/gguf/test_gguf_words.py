"""The tokenizers of encoders in GGUF files: the tokens of transformers' own."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path
from typing import Any

import pytest
from gguf_kit import write_file
from gguf_words_kit import WORDS, word_tokens
from transformers import BertTokenizerFast, XLMRobertaTokenizer

from scheduler.weights.gguf.header import GgufError
from scheduler.weights.gguf.tokenizer import read_gguf_tokenizer

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
    tokens[5] = "\u2581\u211d"  # the sign for real numbers, a capital that has no small letter
    plain = tokenizer_of(tmp_path / "z.gguf", **unsaid, **{"tokenizer.ggml.tokens": tokens})
    assert plain.encode("The moon") == own(True).encode("The moon")
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


MARKS = ["<s>", "<pad>", "</s>", "<unk>"]
PIECES = [*MARKS, "\u2581", "\u2581the", "\u2581moon", "s", "\u2581far", "a", "r", "A", "!", "<mask>"]
SCORES = [0.0] * 4 + [-3.0, -2.0, -2.5, -4.0, -3.5, -5.0, -5.5, -6.0, -6.5, 0.0]


# A map of characters as SentencePiece stores it, of which one makes an A of U+FF21.
CHARSMAP = zlib.decompress(
    base64.b64decode(
        "eNod0lWUlgUUBdBvDSxSugSkuxulpEu6G+lGUkRUujsklRhA6Q4FBunu7m6JMUBABnT/nLX2y3m5D/cE0YMg+DVaEBkVFkQMDgvC"
        "0wShDA7VMYlBbGIRlzjE4wMSEJ9EJCQJiUlGUlKQnJR8SGpSETrxEelISwbSk4mMZCEz2chKDrKTi5zkITf5yEsB8lOIghShMB9T"
        "lGJ8QgmKU4qSlOZTylKG8pSjIhWoTCWqUoVqfEYNqlOLmtShNvWoSwPq04iGNKExzWhKC5rzOS1pTSva0ob2tKMjHehMJ7rShe50"
        "owdf0Iue9KE3X9KXr+jH1/TnGwbwHd8yiIEMCT2cYQxlBMMZxUjGMJpxjGUC45nERKYwmWlMZTrfM5MZzGYWPzCHufzIfOYRzgIW"
        "sZCfWMwSfmYZS1nBclaxkjWsZh1r2cB6NrGRX9jMltDE2cZWthPBDn5jFzvZw272sZcD7OcQBznCYY5xlBMc5xQnOcNpznGWC5zn"
        "Ehe5wmWucZUbXOcWN7nDbe5xlwfc5xEPeczvPOUJkTzjT/7gb/7iBc95yT+85hVv+Je3RPEf797v/38TI4Tf"
    )
)


def pieces(**said: object) -> dict[str, object]:
    """Metadata of a tokenizer of XLM-RoBERTa."""
    marks = {"bos": 0, "eos": 2, "unknown": 3, "padding": 1, "mask": 13}
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.scores": SCORES,
        "tokenizer.ggml.token_type": [3, 3, 3, 2, *[1] * 9, 3],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.normalizer.lowercase": None,
        **{f"tokenizer.ggml.{name}_token_id": number for name, number in marks.items()},
        **said,
    }


@pytest.mark.parametrize("before", [True, False])
def test_pieces_with_scores(before: bool, tmp_path: Path) -> None:
    said = {"tokenizer.ggml.precompiled_charsmap": [*CHARSMAP], "tokenizer.ggml.add_space_prefix": before}
    mine = tokenizer_of(tmp_path / "x.gguf", **pieces(**said))
    scored = [*zip(PIECES, SCORES, strict=True)]
    theirs = XLMRobertaTokenizer(vocab=scored, add_prefix_space=before, _spm_precompiled_charsmap=CHARSMAP)
    for text in ("the moons  far!", " \uff21 far\n", "<mask> the", ""):
        assert mine.encode(text) == theirs.encode(text), text
    assert mine.encode("\uff21")[-2:] == [11, 2]
