"""The tokens that the metadata of a GGUF file has names for: bos, eos, unknown and others. Metadata of other types than
expected is told of in one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from scheduler.weights.gguf.header import GgufError

# By the kind of vocabulary: what llama.cpp takes where the file names none (src/llama-vocab.cpp: ``special_bos_id``),
# and the words that mean such a token. With another word the token at that place is an ordinary or another one.
_DEFAULTS: dict[str, dict[str, tuple[int, tuple[str, ...]]]] = {
    "llama": {
        "bos": (1, ("<s>", "<|startoftext|>")),
        "eos": (2, ("</s>", "<|endoftext|>")),
        "unknown": (0, ("<unk>",)),
    },
    "gpt2": {"bos": (11, ("<|endoftext|>",)), "eos": (11, ("<|endoftext|>",))},
    "t5": {"eos": (1, ("</s>",)), "unknown": (2, ("<unk>",)), "padding": (0, ("<pad>",))},
}


def named_token(metadata: Mapping[str, Any], name: str) -> int | None:
    """The token of this name, if it is in the vocabulary or that is not known. Where the file names none, llama.cpp's
    default is taken only if its word is one for such a token: for GPT-2's kind that is token 11, a comma in most files.
    """
    token, tokens = metadata.get(f"tokenizer.ggml.{name}_token_id"), metadata.get("tokenizer.ggml.tokens")
    if isinstance(token, int) and token >= 0 and (not isinstance(tokens, list) or token < len(tokens)):
        return token
    place, words = _DEFAULTS.get(str(metadata.get("tokenizer.ggml.model")), {}).get(name, (0, ()))
    there = isinstance(tokens, list) and place < len(tokens) and tokens[place] in words
    return place if there else None


def is_mark(word: str) -> bool:
    """Whether a word is spelled as special tokens are. Files name others too: token 0 for padding, often a "!"."""
    return len(word) > 2 and word[0] + word[-1] in ("<>", "[]")


@contextmanager
def damage_told(message: str = "the tokenizer in the file is of an unknown kind or damaged") -> Iterator[None]:
    """Raises ``GgufError`` with ``message`` for whatever goes wrong when something is made of a file: its metadata may
    be of any type. ``tokenizers`` raises plain ``Exception``; others name what they were given.
    """
    try:
        yield
    except (GgufError, ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise GgufError(message) from error
