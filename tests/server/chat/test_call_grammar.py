"""Grammars of calls: what they let a model write, in every form, and what not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from call_forms import ARRAY, BARE, NAMED, XML
from llguidance import LLMatcher

from server.chat.call_form import CallForm
from server.chat.call_grammar import call_grammar
from server.chat.dialect import IN_WORDS
from server.constraints.grammars import GrammarCheck

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
FORMS = [IN_WORDS, ARRAY, BARE, NAMED, XML]
CHECK = GrammarCheck(["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "</think>"])


def tool(name: str, parameters: dict[str, Any] | None, strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


TOOLS = [tool("weather", PARAMETERS), tool("now", NOTHING)]


def grammar(form: CallForm, tools: Any = TOOLS, **options: Any) -> str:
    made = call_grammar(form, tools, **{"required": True, "parallel": True, "special": {}, **options})
    CHECK.validate(made)
    return made


def verdict(grammar: str, text: str) -> bool | None:
    """Whether a reply may be that; None: it may begin so."""
    special = CHECK.special_ids
    tokens = [*text.encode()] if not special else spelled(text, special)
    matcher = LLMatcher(CHECK._tokenizer, grammar, log_level=0)
    if matcher.try_consume_tokens(tokens) < len(tokens):
        return False
    return True if matcher.is_accepting() else None


def spelled(text: str, special: dict[str, int]) -> list[int]:
    """Bytes, and «mark» where a special token is meant."""
    ids: list[int] = []
    for number, part in enumerate(text.replace("»", "«").split("«")):
        ids += [special[part]] if number % 2 else [*part.encode()]
    return ids


def written(form: CallForm, *calls: str) -> str:
    """Calls as the form has them; ``calls`` are NAME ARGUMENTS."""
    told = []
    for call in calls:
        name, _, arguments = call.partition(" ")
        told.append(f"{form.opening}{name}{form.middle}{arguments}{form.closing}")
    return form.start + form.separator.join(told) + form.end


def rome(form: CallForm) -> str:
    if form.parameter is None:
        return 'weather {"city": "Rome", "days": 2}'
    return "weather <parameter=city>\nRome <b>\n</parameter>\n<parameter=days>\n2\n</parameter>\n"


def now(form: CallForm) -> str:
    return "now {}" if form.parameter is None else "now "


@pytest.mark.parametrize("form", FORMS)
def test_a_required_reply_is_a_call_and_nothing_else(form: CallForm) -> None:
    made = grammar(form)
    assert verdict(made, written(form, rome(form))) is True
    assert verdict(made, written(form, now(form))) is True
    assert verdict(made, "Hello") is False
    assert verdict(made, "") is None
    assert verdict(made, written(form, rome(form).replace("weather", "other"))) is False
    assert verdict(made, written(form, rome(form).replace("2", "two"))) is False
    assert verdict(made, written(form, rome(form)) + " more") is False


@pytest.mark.parametrize("form", FORMS)
def test_a_free_reply_is_text_and_its_calls_are_valid(form: CallForm) -> None:
    made = grammar(form, required=False)
    assert verdict(made, "Hello, all.") is True
    assert verdict(made, written(form, rome(form))) is True
    assert verdict(made, written(form, rome(form).replace("city", "town"))) is False
    if form.mark:
        assert verdict(made, f"Let me see. {written(form, rome(form))}") is True
        assert verdict(made, f"Let me see. {form.mark} is a mark") is False


@pytest.mark.parametrize("form", FORMS)
def test_only_one_call_where_only_one_may_be(form: CallForm) -> None:
    both = written(form, rome(form), now(form))
    assert verdict(grammar(form), both) is form.several
    assert verdict(grammar(form, parallel=False), both) is False


def test_parameters_are_required_in_order_and_of_their_type() -> None:
    made = grammar(XML)
    unit = "<parameter=unit>\n{}\n</parameter>\n"
    city = "weather <parameter=city>\nRome\n</parameter>\n"
    assert verdict(made, written(XML, city + unit.format("C"))) is True
    assert verdict(made, written(XML, city + unit.format("K"))) is False
    assert verdict(made, written(XML, "weather " + unit.format("C"))) is False
    assert verdict(made, written(XML, f"{city}<parameter=else>\n1\n</parameter>\n")) is False


def test_a_reply_within_reasoning_ends_that_first() -> None:
    for mark, text in (("</end>", "</end>"), ("</think>", "«</think>»")):
        made = grammar(IN_WORDS, thought=mark, special={"</think>": CHECK.special_ids["</think>"]})
        assert verdict(made, f"Hm, <tool_call>? {text}\n\n{written(IN_WORDS, now(IN_WORDS))}") is True
        assert verdict(made, f"Hm. {text} no call") is False
        assert verdict(made, "Hm.") is None


def test_marks_that_are_special_tokens_are_these_tokens() -> None:
    made = grammar(IN_WORDS, required=False, special=CHECK.special_ids)
    spoken = written(IN_WORDS, now(IN_WORDS))
    meant = spoken.replace("<tool_call>", "«<tool_call>»").replace("</tool_call>", "«</tool_call>»")
    assert verdict(made, f"So: {meant}") is True
    assert verdict(made, f"So: {meant}".replace("now", "nobody")) is False
    assert (
        verdict(grammar(ARRAY, special=CHECK.special_ids), f"«[TOOL_CALLS]» [{written(ARRAY, now(ARRAY))[14:]}") is True
    )


def test_a_reply_that_calls_nothing_is_in_its_format() -> None:
    made = grammar(IN_WORDS, required=False, instead={"type": "object", "required": ["a"]})
    assert verdict(made, '{"a": 1}') is True
    assert verdict(made, written(IN_WORDS, now(IN_WORDS))) is True
    assert verdict(made, "Hello") is False
    assert verdict(made, '{"b": 1}') is False


def test_tools_without_parameters_take_any_object() -> None:
    made = grammar(IN_WORDS, [tool("any", None)])
    assert verdict(made, written(IN_WORDS, 'any {"a": [1]}')) is True
    assert verdict(made, written(IN_WORDS, "any 3")) is False


def test_what_cannot_be_enforced_is_refused_where_it_was_promised() -> None:
    bounded = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}}
    assert grammar(XML, [tool("t", bounded)])
    with pytest.raises(ValueError, match="enforced"):
        grammar(XML, [tool("t", bounded, strict=True)])
    with pytest.raises(ValueError, match="enforce"):
        grammar(IN_WORDS, [tool("t", {"type": "object", "not": {}})])


def test_one_call_is_all_that_is_known_of_some_forms() -> None:
    assert verdict(grammar(replace(IN_WORDS, several=False)), written(IN_WORDS, "now {}", "now {}")) is False
