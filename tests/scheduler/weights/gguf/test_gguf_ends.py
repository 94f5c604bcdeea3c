"""The tokens that end a reply of a GGUF file's model: those of the metadata, and those that llama.cpp finds by word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_kit import F32
from gguf_loaded import rewritten, settings
from gguf_metadata import metadata_of
from gguf_models import written

from scheduler.weights.gguf.ends import read_ends
from scheduler.weights.gguf.file import GgufFile
from scheduler.weights.gguf.header import GgufError
from scheduler.weights.gguf.model import digested_settings

NORMAL, CONTROL, OWN = 1, 3, 4


def _ends(words: str, kind: int = CONTROL, *, architecture: str = "llama", **named: Any) -> list[str]:
    """The ends of a vocabulary of an ``<eos-of-file>`` at 0, the words from 1 on, and two others, as words."""
    tokens = ["<eos-of-file>", *words.split(), "<|user|>", "a"]
    said = {
        "general.architecture": architecture,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kind] * len(tokens),
        "tokenizer.ggml.eos_token_id": 0,
        **{f"tokenizer.ggml.{name}_token_id": token for name, token in named.items()},
    }
    found = [tokens[token] for token in read_ends(said)]
    assert found[0] == "<eos-of-file>"
    return found[1:]


@pytest.mark.parametrize("label", ["falcon-h1", "llama", "qwen3", "gemma3n", "gemma4"])
def test_every_architecture_ends_at_the_words_of_its_vocabulary(label: str, tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", label, F32)
    tokens = list(metadata_of(label)["tokenizer.ggml.tokens"])
    tokens[5], tokens[7], tokens[9] = "<turn|>", "<eos>", "<|im_end|>"
    assert settings(rewritten(path, label, {}, **{"tokenizer.ggml.tokens": tokens})).eos_token_id == [258, 9, 7, 5]


def test_a_configuration_beside_a_file_adds_its_ends(tmp_path: Path) -> None:
    """Of a model that sees, the ends of the whole and those of its text model."""
    path, want = written(tmp_path / "x.gguf", "gemma3", F32)
    text = {**want.config.to_dict(), "eos_token_id": 1}
    own = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}
    (tmp_path / "config.json").write_text(json.dumps(own))
    assert settings(path).eos_token_id == [1, 106, 258]


def test_a_file_that_names_no_end_has_those_of_its_vocabulary(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "x.gguf", "llama", F32)
    unnamed = rewritten(path, "llama", {}, **{"tokenizer.ggml.eos_token_id": None})
    assert settings(unnamed).eos_token_id == 258


@pytest.mark.parametrize(
    "words",
    [
        "<|im_end|>",
        "<|eot_id|> <|eom_id|>",
        "<|end|>",
        "<|return|> <|end|>",
        "<|endoftext|> <|end_of_text|>",
        "<end_of_turn> <eos>",
        "<turn|> <|tool_response>",
        "</s>",
        "[EOS] [EOT]",
        "<EOT> _<EOT>",
        "<｜end▁of▁sentence｜>",
        "<end_of_utterance>",
        "[e~[",
        "<|fim_pad|> <|repo_name|> <|file_sep|>",
        "<fim_pad> <reponame>",
    ],
)
def test_words_that_end_a_reply(words: str) -> None:
    for kind in (CONTROL, OWN, NORMAL):
        assert sorted(_ends(words, kind)) == sorted(words.split())


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        ("<|im_start|> <|observation|> <|assistant|> <think> </think> <s> <pad>", ""),
        ("<|return|> <|call|> <|end|>", "<|return|> <|call|>"),  # it ends a part of a reply there
        ("<|calls|> <|flush|> <|end|>", "<|calls|> <|flush|>"),
        ("<|return|> <|flush|> <|end|>", "<|return|> <|flush|> <|end|>"),
        ("<turn|> </s> <|tool_response>", "<turn|> <|tool_response>"),  # a word like others there
        ("<fim_pad> <|fim_pad|>", "<|fim_pad|>"),
    ],
)
def test_words_that_end_no_reply(words: str, ends: str) -> None:
    assert sorted(_ends(words)) == sorted(ends.split())


@pytest.mark.parametrize("architecture", ["chatglm", "glm4", "glm4moe"])
def test_an_observation_ends_a_reply_of_these(architecture: str) -> None:
    ends = _ends("<|observation|> <|endoftext|>", architecture=architecture, eot=3)
    assert ends == ["<|user|>", "<|endoftext|>", "<|observation|>"]


def test_what_the_metadata_names_ends_a_reply() -> None:
    assert _ends("b c", eot=2, eom=1) == ["c", "b"]
    assert _ends("b c", eot=2, eom=2, fim_pad=1, fim_rep=0) == ["c", "b"]
    assert _ends("b c", eot=5, eom=99, fim_sep=-1) == []  # out of the vocabulary
    assert _ends("<|im_end|> b", eot=2) == ["b", "<|im_end|>"]
    assert _ends("<|fim_pad|> b", fim_pad=2) == ["b"]


@pytest.mark.parametrize(("model", "place"), [("llama", 2), ("gpt2", 11), ("t5", 1)])
def test_an_ordinary_word_at_the_place_of_the_end_ends_no_reply(model: str, place: int) -> None:
    """llama.cpp takes the token there for the end if the file names none."""
    tokens = [chr(97 + number) for number in range(12)]
    assert read_ends({"tokenizer.ggml.model": model, "tokenizer.ggml.tokens": tokens}) == []
    tokens[place] = "</s>" if model != "gpt2" else "<|endoftext|>"
    assert read_ends({"tokenizer.ggml.model": model, "tokenizer.ggml.tokens": ["<eos>", *tokens[1:]]}) == [place, 0]


def test_files_that_say_little() -> None:
    assert read_ends({}) == []
    assert read_ends({"tokenizer.ggml.eos_token_id": 7}) == [7]  # the vocabulary is elsewhere
    assert read_ends({"tokenizer.ggml.tokens": ["a", "<|im_end|>"]}) == [1]  # no types


@pytest.mark.parametrize("own", [None, 7])
def test_an_end_of_which_only_replies_depend_is_in_no_digest(own: int | None, tmp_path: Path) -> None:
    path, want = written(tmp_path / "x.gguf", "llama", F32)
    if own is not None:
        (tmp_path / "config.json").write_text(json.dumps({**want.config.to_dict(), "eos_token_id": own}))
    found = []
    for word in ("<fim_pad>", "a"):
        tokens = list(metadata_of("llama")["tokenizer.ggml.tokens"])
        tokens[5] = word
        file = GgufFile(rewritten(path, "llama", {}, **{"tokenizer.ggml.tokens": tokens}))
        ends = settings(file.opened[0].path)
        assert (5 in ends.eos_token_id if isinstance(ends.eos_token_id, list) else False) == (word != "a")
        found.append(digested_settings(ends))
    assert found[0] == found[1]
    assert "hidden_size" in found[0]


@pytest.mark.parametrize("tokens", [[["a"], ["b"]], ["a", ["b"]]])
def test_a_vocabulary_of_another_type_is_told_of(tokens: list[Any]) -> None:
    with pytest.raises(GgufError, match="the tokenizer in the file is of an unknown kind or damaged"):
        read_ends({"tokenizer.ggml.tokens": tokens})
