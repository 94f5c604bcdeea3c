"""Grammars of answers behind reasoning."""

from __future__ import annotations

from functools import cache

import pytest
from http_context import demo_tokens
from llguidance import LLMatcher, LLTokenizer
from template_styles import THINKS
from transformers import AutoTokenizer

from scheduler.core.constraint import grammar_tokenizer
from server.chat.chat_tokenizer import ChatTokenizer
from server.chat.reasoned_grammar import grammar_behind_reasoning
from server.chat.thinking_budget import measure_budget
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


# Most models that reason have their marks as added tokens that are not special; the last four are texts to a grammar.
ADDED = ["</think>", "<tool_call>", "<a b>", "<|x|>", "[/THINK]", "{a}", "<b", "b>"]


@cache
def marked() -> tuple[ChatTokenizer, LLTokenizer]:
    """A tokenizer with ``ADDED``, none of them special, and as the engine's grammars have it."""
    own = AutoTokenizer.from_pretrained(demo_tokens()._tokenizer.name_or_path)
    own.add_tokens(ADDED)
    own.chat_template = THINKS
    return ChatTokenizer(own), grammar_tokenizer(own, [own.eos_token_id], len(own))


def test_which_added_tokens_are_named_is_what_llguidance_takes_for_special_ones() -> None:
    tokens, under_grammars = marked()
    for text in ADDED:
        (id,) = tokens.encode(text, special=False)
        assert (text in tokens.named_tokens) == under_grammars.is_special_token(id), text


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_end_of_reasoning_that_is_forced_is_taken_where_the_mark_is_an_added_token(kind: str) -> None:
    tokens, under_grammars = marked()
    answer, good, bad = ANSWERS[kind]
    matcher = LLMatcher(under_grammars, grammar_behind_reasoning(answer, "</think>", tokens.named_tokens), log_level=0)
    budget = measure_budget(tokens, "<think>\n", 2, "Enough.", calls=False)
    assert budget is not None
    for said, taken in ((good, True), (bad, False)):
        one = matcher.deep_copy()
        ids = [*tokens.encode("Hm.", special=False), *budget.message, *budget.end, *tokens.encode(said, special=False)]
        assert (one.try_consume_tokens(ids) == len(ids) and one.is_accepting()) is taken
