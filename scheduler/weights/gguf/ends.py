"""The tokens that end a reply, and the special ones: those that the metadata of a GGUF file says are, and those that
are found by their text, of whatever type they are. Replies end where llama.cpp ends them (src/llama-vocab.cpp:
``llama_vocab::impl::load``, ``special_eog_ids``); for special tokens see ``special_tokens``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from scheduler.weights.gguf.named import damage_told, is_mark, named_token

_NAMED = ("eos", "eot", "eom")
_WORDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
)
# Around code that is filled in between other code: the metadata names one of each, or the vocabulary has it. The last
# three end a reply too.
_FILLED = {
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>", "\u2581<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>", "\u2581<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>", "\u2581<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_ENDING = ("fim_pad", "fim_rep", "fim_sep")
_OBSERVATION = "<|observation|>"  # the end of a call of a tool, which files of GLM-4.5 name ``eom``, and others not
_OBSERVING = ("chatglm", "glm4", "glm4moe")
_PARTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # of gpt-oss's replies
_KNOWN = frozenset((*_WORDS, _OBSERVATION, *_PARTS, *chain(*_FILLED.values())))
_MARKS = frozenset(word for word in _KNOWN if word[1] == word[-2] and word[1] in "|\uff5c")
_HIDDEN = {2: True, 3: True, 4: False}  # by llama.cpp's types: unknown, control, and what it calls user-defined


@damage_told()
def read_ends(metadata: Mapping[str, Any]) -> list[int]:
    """The ids of tokens that end a reply, the file's ``eos`` first; none where nothing is known of any."""
    known = _known(metadata)
    ends = [named_token(metadata, name) for name in _NAMED] + _by_words(metadata, known)
    filled = {name: next((known[word] for word in words if word in known), None) for name, words in _FILLED.items()}
    ends += [filled[name] if (said := named_token(metadata, name)) is None else said for name in _ENDING]
    candidates = dict.fromkeys(each for each in ends if each is not None)
    passed = _passed(candidates, metadata)
    return [each for each in candidates if each not in passed]


def special_tokens(metadata: Mapping[str, Any]) -> dict[int, bool]:
    """The ids of tokens that are read whole wherever a text has their words, and whether each is hidden in what is
    shown of a reply: by their types. Ends of replies, tokens around code and parts of gpt-oss's replies are such of
    whatever type if spelled ``<|...|>``, as converters spell special ones, or if the metadata names them. llama.cpp
    makes ``</s>`` and ``<EOT>`` such too, which are words of text of Qwen's vocabulary and others, and ``<|end|>`` of
    gpt-oss and Gemma 4's ``</s>`` ordinary words, whatever the file says.
    """
    words, kinds = _vocabulary(metadata), metadata.get("tokenizer.ggml.token_type") or ()
    typed = enumerate(kinds[: len(words)])
    found = {number: _HIDDEN[kind] for number, kind in typed if kind in _HIDDEN}
    named = (named_token(metadata, name) for name in ("bos", "unknown", "padding", *_NAMED, *_FILLED))
    marks = [number for word, number in _known(metadata).items() if word in _MARKS]
    marks += [each for each in named if each is not None and (is_mark(words[each]) or words[each] in _KNOWN)]
    return found | dict.fromkeys(marks, True)


def _by_words(metadata: Mapping[str, Any], known: Mapping[str, int]) -> list[int]:
    """The tokens that end a reply by their words, apart from those around code."""
    observing = metadata.get("general.architecture") in _OBSERVING
    sought = (*_WORDS, *([_OBSERVATION] if observing else []))
    return [known[word] for word in sought if word in known]


def _vocabulary(metadata: Mapping[str, Any]) -> Sequence[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    return tokens if isinstance(tokens, list) else []


def _known(metadata: Mapping[str, Any]) -> dict[str, int]:
    """The tokens of the vocabulary whose words mean something here."""
    return {word: number for number, word in enumerate(_vocabulary(metadata)) if word in _KNOWN}


def _passed(candidates: Iterable[int], metadata: Mapping[str, Any]) -> set[int]:
    """Which candidates for ends are none beside the others: what ends a part of a reply, and an ordinary word."""
    words = _vocabulary(metadata)
    there = {words[each]: each for each in candidates if each < len(words)}
    calls = "<|call|>" in there or "<|calls|>" in there
    passed = {"<|end|>"} if calls and ("<|return|>" in there or "<|flush|>" in there) else set()
    passed |= {"</s>"} if "<|tool_response>" in there or "<|plamo:eos|>" in there else set()
    return {there[word] for word in passed if word in there}


def listed(ends: int | list[int] | None) -> list[int]:
    """The ends of replies that a configuration has."""
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def as_setting(ends: list[int]) -> int | list[int] | None:
    """What a configuration has for these: a single one need not be a list."""
    found = list(dict.fromkeys(ends))
    return found[0] if len(found) == 1 else found or None
