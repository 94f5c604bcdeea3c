"""The tokenizers of encoders in GGUF files. That of BERT has words, and pieces that continue a word; that of
XLM-RoBERTa has pieces with scores. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from scheduler.weights.gguf.header import GgufError

WORDS, _UNIGRAMS = "bert", "t5"  # what files call such tokenizers
_ARCHITECTURE = "bert"
_SPACE, _CONTINUES = "\u2581", "##"
_ENDS = {
    "bos_token": ("bos", "cls"),
    "eos_token": ("eos", "seperator"),
}  # as files spell them; older ones have the last


def of_words(metadata: Mapping[str, Any], special: Collection[int]) -> Any:
    """The tokenizer without its special tokens. Files have a mark before words, and none before pieces that continue
    one. Where they do not say whether accents go, they do if capitals do.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens = metadata["tokenizer.ggml.tokens"]
    words = [word if number in special else _spelled(word) for number, word in enumerate(tokens)]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if not isinstance(unknown, int) or not 0 <= unknown < len(words):
        raise GgufError("the vocabulary in the file has no token for what is unknown")
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token=words[unknown], max_input_chars_per_word=100))
    accents = metadata.get("tokenizer.ggml.normalizer.strip_accents")
    stripped = accents if isinstance(accents, bool) else None
    backend.normalizer = normalizers.BertNormalizer(lowercase=_lowers(metadata, special), strip_accents=stripped)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(_CONTINUES)
    return backend


def is_of_encoder(metadata: Mapping[str, Any]) -> bool:
    """Whether a vocabulary of pieces with scores is that of an encoder, and not T5's."""
    architecture, kind = metadata.get("general.architecture"), metadata.get("tokenizer.ggml.model")
    return architecture == _ARCHITECTURE and kind == _UNIGRAMS


def of_unigrams(metadata: Mapping[str, Any]) -> Any:
    """The tokenizer of XLM-RoBERTa without its special tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True)
    backend = Tokenizer(models.Unigram([*pieces], unk_id=metadata["tokenizer.ggml.unknown_token_id"]))
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap")
    if charsmap:
        backend.normalizer = normalizers.Precompiled(bytes(charsmap))
    scheme = "always" if metadata.get("tokenizer.ggml.add_space_prefix", True) else "never"
    spaces = pre_tokenizers.Metaspace(_SPACE, scheme)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    backend.decoder = decoders.Metaspace(_SPACE, scheme)
    return backend


def ends_of_texts(metadata: Mapping[str, Any], special: Collection[int]) -> dict[str, str]:
    """The words of the tokens before and behind a text. Raises ``GgufError`` where there are none."""
    tokens, found = metadata["tokenizer.ggml.tokens"], {}
    for setting, names in _ENDS.items():
        numbers = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
        known = [tokens[number] for number in numbers if number in special]
        if not known:
            raise GgufError("the file does not say what stands before and behind a text")
        found[setting] = known[0]
    return found


def _spelled(word: str) -> str:
    """A word as vocabularies of BERT spell it."""
    return word.removeprefix(_SPACE) if word.startswith(_SPACE) else _CONTINUES + word


def _lowers(metadata: Mapping[str, Any], special: Collection[int]) -> bool:
    """Whether texts are lower-cased: as the file says, and in older ones where no word has a capital."""
    said = metadata.get("tokenizer.ggml.normalizer.lowercase")
    if isinstance(said, bool):
        return said
    words = (word for number, word in enumerate(metadata["tokenizer.ggml.tokens"]) if number not in special)
    return not any(character != character.lower() for word in words for character in word)
