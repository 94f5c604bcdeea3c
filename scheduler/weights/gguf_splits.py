"""How text is split into pieces before a byte-level vocabulary's merges, by the name that a GGUF file has for it. The
expressions are llama.cpp's (src/llama-vocab.cpp) for the names that transformers does not know: it would split text for
these as GPT-2 does.
"""

from __future__ import annotations

from typing import Any

from scheduler.weights.gguf_header import GgufError

_ENDINGS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    rf"{_ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*"
    rf"{_ENDINGS}?"
)
_KANA = "\u3040-\u309f\u30a0-\u30ff"
_PUNCTUATED = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
)
_THREE_DIGITS = r"\p{N}{1,3}"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = rf"{_ENDINGS}|{_WORD}|{_THREE_DIGITS}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_ENDINGS}|{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}"
_DEEPSEEK3 = (_THREE_DIGITS, f"[\u4e00-\u9fa5{_KANA}]+", rf"{_PUNCTUATED}[\r\n]*|{_SPACES}")
_WORDS = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

# Each expression splits what the one before has left.
_EXPRESSIONS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"): (r"\p{N}", _GPT2),
    ("chatglm-bpe", "glm4", "glm5"): (_LLAMA3,),
    ("minicpm5",): (_THREE_DIGITS, rf"{_ENDINGS}|{_WORD}|\p{{N}}+|{_SIGNS}|{_SPACES}"),
    ("hunyuan", "stablelm2", "solar-open", "grok-2"): (_QWEN2,),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): _DEEPSEEK3,
    ("deepseek-coder",): (
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    ),
    ("deepseek-llm",): (
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}+",
    ),
    ("falcon",): (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    ("bloom", "poro-chat", "gpt3-finnish"): (_WORDS,),
    ("viking",): (_WORDS, r"\p{N}"),
    ("bailingmoe", "bailingmoe2", "llada-moe"): (
        rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|\p{{N}}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    ("seed-coder",): (rf"{_ENDINGS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
    ("tiny_aya", "cohere2moe"): (
        r"\d{1,3}(?=(?:\d{3})*\b)",
        rf"{_CASED}|{_THREE_DIGITS}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
    ),
    ("exaone-moe",): (
        rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    ("afmoe",): (
        r"\p{N}+",
        r"\A\p{N}{1,2}(?=(?:\p{N}{3})+\z)|\p{N}{3}",  # threes from the right, which looks ahead once
        "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
        "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
        rf"{_PUNCTUATED}[\r\n]*|{_SPACES}",
    ),
}
_SPLITS = {name: expressions for names, expressions in _EXPRESSIONS.items() for name in names}
# Those that are GPT-2's; files without a name, and "default", are read so too.
_OF_GPT2 = frozenset(
    "default gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert "
    "roberta-bpe jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code".split()
)


def set_split(backend: Any, name: str | None, known: frozenset[str]) -> None:
    """Let a byte-level tokenizer, ``tokenizers.Tokenizer``, split text as ``name`` says, unless that is one of those
    that are ``known`` to whoever made it. Raises ``GgufError`` for a name that nobody knows.
    """
    from tokenizers import Regex, pre_tokenizers

    if name is None or name in known or name in _OF_GPT2:
        return
    if name not in _SPLITS:
        raise GgufError("how its vocabulary splits text is not known: put the model's tokenizer.json beside the file")
    splits = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in _SPLITS[name]]
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, whole])
