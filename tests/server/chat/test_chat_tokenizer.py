"""What gives token ids their meaning."""

from __future__ import annotations

import copy
from typing import Any

from http_context import demo_tokens

from server.chat.chat_tokenizer import ChatTokenizer


def changed(**attributes: Any) -> ChatTokenizer:
    """The demo tokenizer with something else about it."""
    tokenizer = copy.deepcopy(demo_tokens()._tokenizer)
    for name, value in attributes.items():
        setattr(tokenizer, name, value)
    return ChatTokenizer(tokenizer)


def test_a_fingerprint_is_that_of_tokenizer_template_and_vocabulary() -> None:
    tokens = demo_tokens()
    size = len(tokens._tokenizer)
    assert changed().fingerprint(size) == tokens.fingerprint(size)
    assert changed(chat_template="{{ messages }}").fingerprint(size) != tokens.fingerprint(size)
    assert tokens.fingerprint(size + 1) != tokens.fingerprint(size)
    more = copy.deepcopy(tokens._tokenizer)
    more.add_tokens(["anotherword"])
    assert ChatTokenizer(more).fingerprint(size) != tokens.fingerprint(size)


class Slow:
    """A tokenizer in pure Python."""

    chat_template = None
    all_special_ids: tuple[int, ...] = ()

    def __init__(self, vocabulary: dict[str, int], special: dict[str, str]) -> None:
        self.special_tokens_map = special
        self._vocabulary = vocabulary

    def get_vocab(self) -> dict[str, int]:
        return self._vocabulary


def test_a_tokenizer_in_python_has_one_too() -> None:
    one = ChatTokenizer(Slow({"a": 0, "b": 1}, {})).fingerprint(2)
    assert ChatTokenizer(Slow({"b": 1, "a": 0}, {})).fingerprint(2) == one
    assert ChatTokenizer(Slow({"a": 1, "b": 0}, {})).fingerprint(2) != one
    assert ChatTokenizer(Slow({"a": 0, "b": 1}, {"eos_token": "b"})).fingerprint(2) != one
