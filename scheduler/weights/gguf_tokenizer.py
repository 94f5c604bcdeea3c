"""The tokenizer and the chat template in the metadata of a GGUF file. A tokenizer beside the file wins.

The server has no torch, and this module needs none: `python -m scheduler.weights.gguf_tokenizer FILE FOLDER` saves the
tokenizer as plain files.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from scheduler.model_names import read_quickly
from scheduler.weights.gguf_header import GgufError, read_metadata
from scheduler.weights.gguf_path import find_file
from scheduler.weights.gguf_splits import ignores_merges, split_expressions

_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_VOCABULARY_OF = {"gemma3n": "gemma3"}  # the architecture by whose name transformers knows a vocabulary's spelling
_SPACE = "\u2581"  # in SentencePiece vocabularies
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


def _convert(metadata: dict[str, Any]) -> Any:
    """The tokenizer that the metadata describes."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    groups = {
        group: {name: metadata[f"tokenizer.{key}"] for key, name in renames.items() if f"tokenizer.{key}" in metadata}
        for group, renames in GGUF_TOKENIZER_MAPPING.items()
    }
    described, settings = groups["tokenizer"], groups["tokenizer_config"]
    tokens = described.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise GgufError("there is no tokenizer in the file or beside it")
    if described.get("tokenizer_type") == "llama":
        settings.setdefault("add_bos_token", True)  # as llama.cpp does where the file does not say
    elif described.get("tokenizer_type") == "gemma4":
        settings["add_bos_token"] = False  # its chat template writes the token
    for name, key in _SPECIAL.items():
        token = metadata.get(f"tokenizer.ggml.{key}")
        settings[name] = tokens[token] if isinstance(token, int) and 0 <= token < len(tokens) else None
    architecture = str(metadata.get("general.architecture"))
    split = described.pop("pre_tokenizer_type", None)  # transformers knows few, and takes GPT-2's for the others
    by_bytes = described.get("tokenizer_type") == "gpt2"
    expressions = split_expressions(split) if by_bytes else ()
    try:
        backend, _ = convert_gguf_tokenizer(_VOCABULARY_OF.get(architecture, architecture), described)
    except (KeyError, ValueError, IndexError, TypeError, AttributeError) as error:
        raise GgufError("the tokenizer in the file is of an unknown kind or damaged") from error
    if by_bytes:
        backend.pre_tokenizer = _split(expressions)
        backend.model.ignore_merges = ignores_merges(split)
    elif described.get("tokenizer_type") == "llama":
        _write_spaces(backend, described.get("add_prefix_space", not architecture.startswith("gemma")))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def _split(expressions: tuple[str, ...]) -> Any:
    """What splits text by each of the expressions in turn, and spells what is left as bytes."""
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in expressions]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _write_spaces(backend: Any, before: bool) -> None:
    """Has a SentencePiece tokenizer write spaces as llama.cpp does (src/llama-vocab.cpp: ``tokenize``, ``detokenize``):
    if ``before``, one more before a text and after each special token, also where there is one, and the first one of
    what is decoded is taken away. transformers' tokenizers of most kinds put one before a text that begins with none.
    """
    from tokenizers import decoders, normalizers

    further = [normalizers.Prepend(_SPACE)] if before else []
    backend.normalizer = normalizers.Sequence([*further, normalizers.Replace(" ", _SPACE)])
    backend.pre_tokenizer = None
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
