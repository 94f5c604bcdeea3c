"""The tokenizer and the chat template in the metadata of a GGUF file. A tokenizer beside the file wins.

The server has no torch, and this module needs none: `python -m scheduler.weights.gguf.tokenizer FILE FOLDER` saves the
tokenizer as plain files.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scheduler.model_names import read_quickly
from scheduler.weights.gguf.ends import special_tokens
from scheduler.weights.gguf.header import GgufError, read_metadata
from scheduler.weights.gguf.named import damage_told, named_token
from scheduler.weights.gguf.path import find_file
from scheduler.weights.gguf.splits import begins_texts, ignores_merges, split_expressions
from scheduler.weights.gguf.words import WORDS, ends_of_texts, is_of_encoder, of_unigrams, of_words

_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_VOCABULARY_OF = {"gemma3n": "gemma3"}  # the architecture by whose name transformers knows a vocabulary's spelling
_SPACE = "\u2581"  # in SentencePiece vocabularies
_STRIPPING = ("phi-3", "phi3", "phi 3")  # names of models; llama.cpp knows the first two, converters write the third
_UNSTRIPPED = ("<unk>", "<s>", "<|endoftext|>")
_INSTRUCTION = "[INST]"  # a token of Mistral's vocabularies from v2 on; earlier, and of Llama 2, a text
_SENTINELS = {f"<extra_id_{number}>": True for number in range(100)}  # of T5, whose files call them [PAD32000]...
_BESIDE = ("tokenizer.json", "tokenizer.model")


def read_gguf_tokenizer(path: Path) -> Any:
    """The tokenizer for the model in a GGUF file, the first one if it is split. Raises ``OSError``, ``GgufError`` where
    the file has none of a known kind.
    """
    metadata = read_metadata(path)
    template = metadata.get("tokenizer.chat_template")
    if any((path.parent / name).is_file() for name in _BESIDE):
        from transformers import AutoTokenizer

        beside = AutoTokenizer.from_pretrained(str(path.parent))
        if beside.chat_template is None and isinstance(template, str):
            beside.chat_template = template
        return beside
    return _convert(metadata)


@damage_told()
def _convert(metadata: dict[str, Any]) -> Any:
    """The tokenizer that the metadata describes."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING

    groups = {
        group: {name: metadata[f"tokenizer.{key}"] for key, name in renames.items() if f"tokenizer.{key}" in metadata}
        for group, renames in GGUF_TOKENIZER_MAPPING.items()
    }
    described, settings = groups["tokenizer"], groups["tokenizer_config"]
    tokens = described.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise GgufError("there is no tokenizer in the file or beside it")
    if not isinstance(settings.get("chat_template", ""), str):
        raise GgufError("the chat template in the file is not a text")
    settings |= _around(described, settings)
    special = special_tokens(metadata)
    for name, key in _SPECIAL.items():
        settings[name] = tokens[token] if (token := named_token(metadata, key)) in special else None
    by_bytes = described.get("tokenizer_type") == "gpt2"
    splits = _split(split_expressions(described.get("pre_tokenizer_type"))) if by_bytes else None
    if described.get("tokenizer_type") == WORDS:
        settings |= ends_of_texts(metadata, special)
        backend = of_words(metadata, special)
    elif is_of_encoder(metadata):
        backend = of_unigrams(metadata)
    else:
        backend = _by_bytes(described, splits) if by_bytes else _of_pieces(metadata, described, special)
    _add_special(backend, metadata, special)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def _around(described: dict[str, Any], said: dict[str, Any]) -> dict[str, bool]:
    """Whether a token begins texts, and one ends them: as the file says, and llama.cpp where it says nothing. Gemma 4
    needs its begin, whatever the file says. Chats have what their template writes.
    """
    kind = described.get("tokenizer_type")
    begun = kind in ("llama", WORDS) or (kind == "gpt2" and begins_texts(described.get("pre_tokenizer_type")))
    return {
        "add_bos_token": kind == "gemma4" or bool(said.get("add_bos_token", begun)),
        "add_eos_token": bool(said.get("add_eos_token", kind in ("t5", WORDS))),
    }


def _by_bytes(described: dict[str, Any], splits: Any) -> Any:
    """A byte-level tokenizer. Its words stay as the file spells them: special tokens are not spelled as bytes."""
    from tokenizers import Tokenizer, decoders, models

    whole = ignores_merges(described.get("pre_tokenizer_type"))
    vocabulary = {token: number for number, token in enumerate(described["tokens"])}
    merges = [tuple(each.split(" ")) for each in described["merges"]]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole))
    backend.pre_tokenizer = splits
    backend.decoder = decoders.ByteLevel()
    return backend


def _of_pieces(metadata: dict[str, Any], described: dict[str, Any], special: Mapping[int, bool]) -> Any:
    """A tokenizer of SentencePiece's kinds, without the special tokens of the class that transformers makes it of: they
    need not be in the vocabulary.
    """
    from tokenizers import Tokenizer
    from transformers.integrations.gguf import convert_gguf_tokenizer

    architecture = str(metadata.get("general.architecture"))
    without = {name: value for name, value in described.items() if name not in ("pre_tokenizer_type", "token_type")}
    made, _ = convert_gguf_tokenizer(_VOCABULARY_OF.get(architecture, architecture), without)
    backend = Tokenizer(made.model)
    unknown = getattr(made.model, "unk_token", None)
    if unknown is not None and backend.token_to_id(unknown) is None:
        raise GgufError(f"the vocabulary in the file has no {unknown}")  # texts would be errors, each of them later
    backend.normalizer, backend.pre_tokenizer, backend.decoder = made.normalizer, made.pre_tokenizer, made.decoder
    if described["tokenizer_type"] == "llama":
        before = described.get("add_prefix_space", not architecture.startswith("gemma"))
        instructed = any(described["tokens"][number] == _INSTRUCTION for number in special)
        _write_spaces(backend, before, first=instructed)
    return backend


def _add_special(backend: Any, metadata: dict[str, Any], special: Mapping[int, bool]) -> None:
    """Has tokens that are no ordinary words read whole wherever a text has them; of Phi-3 with the space behind."""
    from tokenizers import AddedToken

    tokens = metadata["tokenizer.ggml.tokens"]
    strips = any(name in str(metadata.get("general.name")).lower() for name in _STRIPPING)
    found = {tokens[number]: hidden for number, hidden in special.items()}
    if metadata.get("tokenizer.ggml.model") == "t5":
        found |= _SENTINELS
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=hidden, rstrip=strips and token not in _UNSTRIPPED)
            for token, hidden in found.items()
            if backend.token_to_id(token) is not None
        ]
    )


def _split(expressions: tuple[str, ...]) -> Any:
    """What splits text by each of the expressions in turn, and spells what is left as bytes."""
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in expressions]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _write_spaces(backend: Any, before: bool, first: bool) -> None:
    """Has a SentencePiece tokenizer write spaces. If ``before``, one more before a text and after each special token,
    also where there is one, and the first one of what is decoded is taken away: as llama.cpp does (src/llama-vocab.cpp:
    ``tokenize``, ``detokenize``), and as the tokenizer.json of Llama 2, Mistral v0.1 and their kin. If ``first`` too,
    one before a text that begins with none and with no special token, and none after those: so does the tokenizer.json
    of Mistral's models from v2 on, and llama.cpp does not, which gives their chats a further token after each mark.
    """
    from tokenizers import decoders, normalizers, pre_tokenizers

    further = [normalizers.Prepend(_SPACE)] if before and not first else []
    backend.normalizer = normalizers.Sequence([*further, normalizers.Replace(" ", _SPACE)])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, "first", split=False) if before and first else None
    taken = [decoders.Strip(" ", left=1)] if before else []
    spelled = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*spelled, *taken])


if __name__ == "__main__":
    read_quickly()
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # importing it is an ImportError then
    try:
        read_gguf_tokenizer(find_file(sys.argv[1]) or Path(sys.argv[1])).save_pretrained(sys.argv[2])
    except Exception as error:
        print(next(iter(str(error).splitlines()), type(error).__name__), file=sys.stderr)
        sys.exit(1)
