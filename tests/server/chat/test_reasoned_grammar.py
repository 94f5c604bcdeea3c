"""Grammars of answers behind reasoning."""

from __future__ import annotations

from functools import cache

import pytest
from http_context import demo_tokens
from llguidance import LLMatcher, LLTokenizer

from scheduler.core.constraint import grammar_tokenizer
from server.chat.reasoned_grammar import grammar_behind_reasoning
from server.constraints.grammars import choice_grammar, json_schema_grammar, lark_grammar, regex_grammar

FLAG = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}},
    "required": ["yes"],
    "additionalProperties": False,
}
ANSWERS = {
    "json": (json_schema_grammar(FLAG), '{"yes": true}', '{"no": true}'),
    "regex": (regex_grammar("[ab]{3}"), "aba", "abc"),
    "choice": (choice_grammar(["yes", "no"]), "no", "na"),
    "lark": (lark_grammar('start: "a" rest\nrest: "b"+'), "abb", "ba"),
}


@cache
def tokenizer() -> LLTokenizer:
    """The demo model's."""
    own = demo_tokens()._tokenizer
    return grammar_tokenizer(own, [own.eos_token_id], len(own))


def matches(grammar: str, text: str) -> bool:
    """Whether a reply may be this text."""
    matcher = LLMatcher(tokenizer(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = demo_tokens().encode(text, special=False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("closing", ["</think>", "<|im_start|>"])
@pytest.mark.parametrize("kind", ANSWERS)
def test_the_answer_begins_behind_the_reasoning(kind: str, closing: str) -> None:
    answer, good, bad = ANSWERS[kind]
    special = {"<|im_start|>": demo_tokens().encode("<|im_start|>", special=False)[0]}
    grammar = grammar_behind_reasoning(answer, closing, special)
    for before in ("Hm. {}", "", "Well\n\n"):
        for space in ("", "\n\n"):
            assert matches(grammar, f"{before}{closing}{space}{good}")
            assert not matches(grammar, f"{before}{closing}{space}{bad}")
    assert not matches(grammar, good)
    assert matches(answer, good)
