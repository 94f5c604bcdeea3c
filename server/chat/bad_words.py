"""Encodes ``bad_words`` as sequences of token ids that a reply may not contain."""

from __future__ import annotations

from collections.abc import Sequence

from server.chat.chat_tokenizer import ChatTokenizer


def encode_bad_words(words: Sequence[str], tokens: ChatTokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Bad words as sequences of token ids. Each word is encoded as at the beginning of a text, and as after a space if
    that only changes its first token. Blocking: run it on the pool.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        first = tuple(tokens.encode(bare, special=False))
        spaced = tuple(tokens.encode(f" {bare}", special=False))
        for ids in (first, spaced if len(spaced) == len(first) and spaced[:1] != first[:1] else ()):
            if ids and ids[-1] < vocab_size:
                found[ids] = None
    return tuple(found)
