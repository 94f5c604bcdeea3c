"""The tokens that end a reply: those that the metadata of a GGUF file names, and those that llama.cpp finds by their
text, of whatever type they are (src/llama-vocab.cpp: ``llama_vocab::impl::load``, ``special_eog_ids``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMED = ("eos", "eot", "eom")
_WORDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
)
# Around code that is filled in between other code: the metadata names one of each, or the vocabulary has it.
_FILLED = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_OBSERVATION = "<|observation|>"  # the end of a call of a tool, which files of GLM-4.5 name ``eom``, and others not
_OBSERVING = ("chatglm", "glm4", "glm4moe")


def read_ends(metadata: Mapping[str, Any]) -> list[int]:
    """The ids of tokens that end a reply, the file's ``eos`` first; none where nothing is known of any."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    words = tokens if isinstance(tokens, list) else []
    known = {*_WORDS, *([_OBSERVATION] if metadata.get("general.architecture") in _OBSERVING else [])}
    sought = known.union(*_FILLED.values())
    there = {word: number for number, word in enumerate(words) if word in sought}
    ends = [_named(metadata, name) for name in _NAMED]
    ends += [number for word, number in there.items() if word in known]
    for name, spellings in _FILLED.items():
        said = _named(metadata, name)
        ends.append(next((there[word] for word in spellings if word in there), None) if said is None else said)
    found = list(dict.fromkeys(each for each in ends if each is not None))
    passed = _passed({words[each] for each in found if each < len(words)})
    return [each for each in found if each >= len(words) or words[each] not in passed]


def _named(metadata: Mapping[str, Any], name: str) -> int | None:
    """The token of this name in the metadata, if it is in the vocabulary or that is not known."""
    token, tokens = metadata.get(f"tokenizer.ggml.{name}_token_id"), metadata.get("tokenizer.ggml.tokens")
    if not isinstance(token, int) or token < 0 or (isinstance(tokens, list) and token >= len(tokens)):
        return None
    return token


def _passed(words: set[str]) -> set[str]:
    """Which of the words for ends are none beside the others: what ends a part of a reply, and an ordinary word."""
    calls = "<|call|>" in words or "<|calls|>" in words
    passed = {"<|end|>"} if calls and ("<|return|>" in words or "<|flush|>" in words) else set()
    return passed | ({"</s>"} if "<|tool_response>" in words or "<|plamo:eos|>" in words else set())
