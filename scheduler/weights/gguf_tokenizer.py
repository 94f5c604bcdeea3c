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
from scheduler.weights.gguf_splits import set_split

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
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

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
    try:
        backend, _ = convert_gguf_tokenizer(_VOCABULARY_OF.get(architecture, architecture), described)
    except (KeyError, ValueError, IndexError, TypeError, AttributeError) as error:
        raise GgufError("the tokenizer in the file is of an unknown kind or damaged") from error
    if described.get("tokenizer_type") == "gpt2":
        set_split(backend, metadata.get("tokenizer.ggml.pre"), frozenset(GGUF_PRE_TOKENIZER_SPLITS))
    if metadata.get("tokenizer.ggml.add_space_prefix") is False:
        _add_no_space(backend)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def _add_no_space(backend: Any) -> None:
    """Let a SentencePiece tokenizer begin a text with what it begins with, not with a space."""
    from tokenizers import decoders, pre_tokenizers

    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer.prepend_scheme = "never"
        backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])


if __name__ == "__main__":
    read_quickly()
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # importing it is an ImportError then
    try:
        read_gguf_tokenizer(find_file(sys.argv[1]) or Path(sys.argv[1])).save_pretrained(sys.argv[2])
    except Exception as error:
        print(next(iter(str(error).splitlines()), type(error).__name__), file=sys.stderr)
        sys.exit(1)
