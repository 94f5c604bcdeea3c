"""Texts and pairs cut to a number of tokens, as transformers cuts them."""

from __future__ import annotations

import pytest
from pooling_kit import pooling_tokenizer

from server.chat.chat_tokenizer import ChatTokenizer, cut_longer

LENGTHS = (0, 1, 2, 5, 6, 11, 20)


@pytest.mark.parametrize("backend", [True, False], ids=["tokenizers", "Python"])
def test_they_are_cut_as_transformers_does(backend: bool) -> None:
    theirs = pooling_tokenizer()
    tokens = ChatTokenizer(pooling_tokenizer())
    if not backend:
        tokens._backend = None  # as of a tokenizer that is written in Python
    for first in LENGTHS:
        for second in (None, *LENGTHS):
            for limit in (4, 5, 9, 12, 60):
                given = [["a" * first]] if second is None else [["a" * first], ["b" * second]]
                want = theirs(*given, truncation="longest_first", max_length=limit)
                got = tokens.encode_within("a" * first, limit, None if second is None else "b" * second)
                assert [[got.ids], [got.types]] == [want["input_ids"], want["token_type_ids"]], (given, limit)
                assert got.whole == len(theirs(*given)["input_ids"][0])
    tokens.close()


def test_both_texts_keep_what_they_can() -> None:
    assert cut_longer(3, 4, 7) == (3, 4)
    assert cut_longer(3, 10, 7) == (3, 4)
    assert cut_longer(10, 3, 7) == (4, 3)
    assert cut_longer(10, 10, 7) == (3, 4)
    assert cut_longer(5, 0, 3) == (3, 0)
