"""The tokens that end a reply, and the special ones: those that the metadata of a GGUF file says are, and those that
llama.cpp finds by their text, of whatever type they are (src/llama-vocab.cpp: ``llama_vocab::impl::load``,
``special_eog_ids``, ``cache_special_tokens``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.weights.gguf_named import named_token

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
_UNKNOWN, _CONTROL, _OWN = 2, 3, 4  # llama.cpp's types of tokens; the last is what it calls user-defined


def read_ends(metadata: Mapping[str, Any]) -> list[int]:
    """The ids of tokens that end a reply, the file's ``eos`` first; none where nothing is known of any."""
    words = _vocabulary(metadata)
    found = _candidates(metadata, words)
    passed = _passed(found, words)
    return [each for each in found if each not in passed]


def special_tokens(metadata: Mapping[str, Any]) -> dict[int, bool]:
    """The ids of tokens that are read whole wherever a text has their words, and whether each is hidden in what is
    shown of a reply. Ends of replies and tokens around code are such, also where the file has them for ordinary words.
    """
    words, kinds = _vocabulary(metadata), metadata.get("tokenizer.ggml.token_type") or ()
    typed = enumerate(kinds[: len(words)])
    found = {number: kind != _OWN for number, kind in typed if kind in (_UNKNOWN, _CONTROL, _OWN)}
    around = [number for name, number in _around_code(words).items() if named_token(metadata, name) is None]
    for number in (*around, *(number for number, word in enumerate(words) if word in _WORDS)):
        found[number] = True
    for number in (number for number, word in enumerate(words) if word in _PARTS):
        found.setdefault(number, False)
    for number in _passed(_candidates(metadata, words), words):
        found.pop(number)
        if words[number] == "<|end|>":
            found[number] = False
    return found


def _candidates(metadata: Mapping[str, Any], words: Sequence[str]) -> list[int]:
    """The tokens that end a reply, and those that only look like it."""
    known = {*_WORDS, *([_OBSERVATION] if metadata.get("general.architecture") in _OBSERVING else [])}
    ends = [named_token(metadata, name) for name in _NAMED]
    ends += [number for number, word in enumerate(words) if word in known]
    filled = _around_code(words)
    ends += [filled.get(name) if (said := named_token(metadata, name)) is None else said for name in _ENDING]
    return list(dict.fromkeys(each for each in ends if each is not None))


def _vocabulary(metadata: Mapping[str, Any]) -> Sequence[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    return tokens if isinstance(tokens, list) else []


def _around_code(words: Sequence[str]) -> dict[str, int]:
    """The tokens of the vocabulary that are around code, by the names that metadata has for them."""
    sought = {word for spellings in _FILLED.values() for word in spellings}
    there = {word: number for number, word in enumerate(words) if word in sought}
    found = {name: next((word for word in spellings if word in there), None) for name, spellings in _FILLED.items()}
    return {name: there[word] for name, word in found.items() if word is not None}


def _passed(candidates: Sequence[int], words: Sequence[str]) -> set[int]:
    """Which candidates for ends are none beside the others: what ends a part of a reply, and an ordinary word."""
    there = {words[each]: each for each in candidates if each < len(words)}
    calls = "<|call|>" in there or "<|calls|>" in there
    passed = {"<|end|>"} if calls and ("<|return|>" in there or "<|flush|>" in there) else set()
    passed |= {"</s>"} if "<|tool_response>" in there or "<|plamo:eos|>" in there else set()
    return {there[word] for word in passed if word in there}
