"""How text is split before merges, by the name that a GGUF file of a byte-level vocabulary has for it.

The names and expressions are llama.cpp's (src/llama-vocab.cpp: ``llama_vocab::impl::load``, ``llm_tokenizer_bpe``).
Where llama.cpp has rewritten an expression for its own matcher, this table has that of the model's tokenizer.json.
"""

from __future__ import annotations

from scheduler.weights.gguf.header import GgufError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_THREE = r"\p{N}{1,3}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = "|".join((_CONTRACTIONS, _WORD, _THREE, _MARKS, _SPACES))
_QWEN2 = "|".join((_CONTRACTIONS, _WORD, r"\p{N}", _MARKS, _SPACES))
_QWEN35 = "|".join(
    (
        _CONTRACTIONS,
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        _SPACES,
    )
)
_FIRST, _LARGE, _SMALL = r"[^\r\n\p{L}\p{N}]?", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = (f"{_FIRST}[{_LARGE}]*[{_SMALL}]+", f"{_FIRST}[{_LARGE}]+[{_SMALL}]*")  # words end before a new capital
_MARKS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_CASED_AND_CONTRACTED = "|".join(f"{each}{_CONTRACTIONS}?" for each in _CASED)
_TEKKEN = "|".join((*_CASED, r"\p{N}", _MARKS_AND_SLASHES, _SPACES))
_GPT4O = "|".join((_CASED_AND_CONTRACTED, _THREE, _MARKS_AND_SLASHES, _SPACES))
_NOT_HAN = r"&&[^\p{Han}]"
_KIMI = "|".join(
    (
        r"[\p{Han}]+",
        f"{_FIRST}[{_LARGE}{_NOT_HAN}]*[{_SMALL}{_NOT_HAN}]+{_CONTRACTIONS}?",
        f"{_FIRST}[{_LARGE}{_NOT_HAN}]+[{_SMALL}{_NOT_HAN}]*{_CONTRACTIONS}?",
        _THREE,
        _MARKS,
        _SPACES,
    )
)
_LATIN = (  # and Greek, Cyrillic, Armenian, Georgian and other letters that have two cases
    r"\s?["
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώ"
    "ᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏"
    "𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
    r"]+"
)
_HAN_AND_HANGUL = "[一-龥ࠀ-一가-퟿]+"
_HAN_AND_KANA = "[一-龥぀-ゟ゠-ヿ]+"
_AFTER_MARK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
)
_AFTER_MARK_AND_LINES = rf"{_AFTER_MARK}[\r\n]*|{_SPACES}"
_WITHOUT_STOPS = r" ?[^(\s|.,!?…。，、।۔،)]+"

# Of afmoe, superbpe and tiny_aya digits are split into threes from the right: a run of digits is looked at once.
_NO_THREE = r"(?:\D++|(?<!\d)\d{1,2}(?=(?:\d{3})*(?!\d)))"

# Expressions, each of which splits what the ones before have left whole, and the names that files have for them.
_NAMES: dict[tuple[str, ...], str] = {
    (_GPT2,): (
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert roberta-bpe "
        "jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code"
    ),
    (r"\p{N}", _GPT2): "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
    (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"): "falcon",
    (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"): "default",
    (_LLAMA3,): (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe chatglm-bpe "
        "glm4 glm5"
    ),
    (
        "|".join((_CONTRACTIONS, _WORD, _THREE, _MARKS, r"\s*[\r\n]+"))
        + "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
        + r"|\s{1,2}(?!\S)|\s{1}",
    ): "jais-2",
    (_THREE, "|".join((_CONTRACTIONS, _WORD, r"\p{N}+", _MARKS, _SPACES))): "minicpm5",
    (_QWEN2,): "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    (r"[^\n]+|[\n]+", _QWEN2): "laguna",
    ("|".join((_WORD, r"\p{N}", _MARKS, _SPACES)),): "ufakzeka",
    (_QWEN35,): "qwen35",
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    ): "bailingmoe bailingmoe2 llada-moe",
    ("|".join((_CONTRACTIONS, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _SPACES)),): "seed-coder",
    (
        rf"{_CONTRACTIONS}|{_FIRST}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ): "exaone-moe",
    (_TEKKEN,): "tekken",
    (_GPT4O,): "gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m",
    (r"(?<!\d)\d++\b", r"\A\d{1,2}(?=(?:\d{3})+\z)|\G\d{3}", _GPT4O): "tiny_aya cohere2moe",
    (
        rf"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{_HAN_AND_KANA}",
        "|".join((_CASED_AND_CONTRACTED, r"\p{N}", _MARKS_AND_SLASHES, _SPACES)),
    ): "youtu",
    (_KIMI,): "kimi-k2",
    (r"[\r\n]", _LATIN, r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _HAN_AND_HANGUL, r"\p{N}+"): "deepseek-llm",
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}"): "deepseek-coder",
    (_THREE, _HAN_AND_KANA, _AFTER_MARK_AND_LINES): "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
    (_THREE, _HAN_AND_KANA, rf"{_AFTER_MARK}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"): "spark2_5",
    (
        r"\p{N}+",
        r"\A\p{N}{1,2}(?=(?:\p{N}{3})+\z)|\p{N}{3}",
        "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
        _AFTER_MARK_AND_LINES,
    ): "afmoe",
    (r"\p{N}+", rf"{_NO_THREE}+|\d{{3}}{_NO_THREE}*"): "superbpe",
    (_WITHOUT_STOPS,): "poro-chat bloom gpt3-finnish",
    (_WITHOUT_STOPS, r"\p{N}"): "viking",
    (
        r"<sentinel:[0-9]+>",
        r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT2,
    ): "chameleon",
}
# Of these a piece that is a token as a whole is that token, whether merges lead to it or not.
_WHOLE = frozenset(
    "minicpm5 llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano youtu glm4 glm5 tekken "
    "granite-embed-multi-97m".split()
)
# Texts of these begin with a token for that, unless the file says otherwise.
_BEGUN = frozenset(
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken chameleon".split()
)
_SPLITS = {name: expressions for expressions, names in _NAMES.items() for name in names.split()}


def ignores_merges(name: str | None) -> bool:
    """Whether pieces that are tokens are not merged, llama.cpp's ``ignore_merges``."""
    return name in _WHOLE


def begins_texts(name: str | None) -> bool:
    """Whether a token is put before texts where the file does not say so, llama.cpp's ``add_bos``."""
    return name in _BEGUN


def split_expressions(name: str | None) -> tuple[str, ...]:
    """The expressions for the ``tokenizer.ggml.pre`` of a file, in the order in which they are applied; those of
    ``default`` where it is None, as in llama.cpp. Raises ``GgufError`` for an unknown name.
    """
    if (found := _SPLITS.get(str(name or "default"))) is None:
        raise GgufError(
            f"how its tokenizer splits text ({name}) is unknown: put the model's tokenizer.json beside the file"
        )
    return found
