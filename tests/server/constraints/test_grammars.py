"""Grammars from requests: what they accept, and nasty ones refused at once and without an echo."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import llguidance
import pytest
from http_context import Site, demo_tokens, served
from llguidance import LLMatcher, LLTokenizer

from server.constraints import grammars
from server.constraints.grammars import (
    GrammarCheck,
    choice_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from server.constraints.json_schema import check_schema

Schema = dict[str, Any]


def tokenizer() -> LLTokenizer:
    """The demo model's."""
    backend = demo_tokens()._backend
    assert backend is not None
    return LLTokenizer(backend.to_str(), n_vocab=1024, eos_token=2)


TOKENIZER = tokenizer()


def accepts(grammar: str, text: str) -> bool:
    """Whether ``text`` is complete under ``grammar``."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZER.tokenize_str(text, parse_special=True)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


# -- what they accept -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "minimum": 3}, ["3", "12"], ["2", "3.5", '"3"']),
        ({"type": ["string", "null"]}, ['"a"', "null"], ["1"]),
        ({"enum": [1, "a", {"x": [1]}]}, ["1", '"a"', '{"x":[1]}'], ["2", '{"x":[]}']),
        ({"anyOf": [{"type": "boolean"}, {"const": "no"}]}, ["true", '"no"'], ['"yes"']),
        ({"allOf": [{"minimum": 3}, {"maximum": 5}], "type": "integer"}, ["4"], ["2", "6"]),
        ({"type": "string", "pattern": "^a[0-9]+$"}, ['"a12"'], ['"b1"', '"a"']),
        ({"type": "string", "format": "date"}, ['"2024-02-28"'], ['"2024-13-01"']),
        ({"type": "number", "multipleOf": 0.01}, ["1.25"], ["1.255"]),
        ({"type": "array", "prefixItems": [{"type": "string"}], "items": False}, ['["a"]'], ["[1]", '["a",1]']),
        (
            {"$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
            ['{"next": {"next": {}}}'],
            ['{"next": 1}'],
        ),
        (
            {"oneOf": [{"properties": {"k": {"const": c}}, "required": ["k"], "type": "object"} for c in "ab"]},
            ['{"k":"a"}', '{"k":"b"}'],
            ['{"k":"c"}', "{}"],
        ),
    ],
)
def test_schemas_are_obeyed_exactly(schema: Schema, good: list[str], bad: list[str]) -> None:
    grammar = json_schema_grammar(schema)
    GrammarCheck().validate(grammar)
    assert [accepts(grammar, text) for text in good] == [True] * len(good)
    assert [accepts(grammar, text) for text in bad] == [False] * len(bad)


def test_json_is_laid_out_as_people_do_but_never_without_end() -> None:
    grammar = json_schema_grammar({"type": "object"})
    value = {"a": 1, "b": [1, {"c": None}]}
    for text in (json.dumps(value), json.dumps(value, indent=4), json.dumps(value, separators=(",", ":"))):
        assert accepts(grammar, text)
    assert not accepts(grammar, '{"a":  1}')
    assert not accepts(grammar, "{\n\n}")
    assert not accepts(grammar, "{}\n")


def test_objects_regexes_choices_and_lark() -> None:
    assert accepts(json_schema_grammar({"type": "object"}), '{"a": [1]}')
    assert not accepts(json_schema_grammar({"type": "object"}), "[1]")
    assert accepts(regex_grammar('[a-c]+/"\n'), 'abc/"\n')
    assert not accepts(regex_grammar("[a-c]+"), "abcd")
    strange = ["left or right", 'a "b" \\n', "line\nbreak", "\x7f\x01", "€ 😀", "/x/"]
    assert all(accepts(choice_grammar(strange), text) for text in strange)
    assert not accepts(choice_grammar(strange), "left")
    assert accepts(lark_grammar('start: "a"~2..3 %json {"type": "null"}'), "aanull")
    assert accepts(lark_grammar("start: <|im_start|> /[a-z]+/"), "<|im_start|>x")


# -- what is refused ------------------------------------------------------------------------------------------------


def nested(depth: int) -> Schema:
    schema: Schema = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def circle() -> Schema:
    return {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}}


NASTY: dict[str, Callable[[], Schema]] = {
    "itself": lambda: {"$ref": "#"},
    "a circle": lambda: {**circle(), "$ref": "#/$defs/a"},
    "elsewhere": lambda: {"$ref": "https://example.org/schema"},
    "nowhere": lambda: {"$ref": "#/$defs/secret"},
    "no schema": lambda: {"$ref": "#/type", "type": "string"},
    "a huge enum": lambda: {"enum": [f"secret{n}" for n in range(50_000)]},
    "many enums": lambda: {"items": {"anyOf": [{"enum": [f"{n}-{m}" for m in range(100)]} for n in range(11)]}},
    "deep": lambda: nested(80),
    "very deep": lambda: nested(20_000),
    "wide": lambda: {"anyOf": [{"const": n} for n in range(10_001)]},
    "long": lambda: {"items": {"enum": [f"{n:09000}" for n in range(30)]}},
    "a long string": lambda: {"const": "x" * 10_001},
    "a long name": lambda: {"properties": {"x" * 10_001: {}}},
    "many options": lambda: {"properties": {f"p{n}": {} for n in range(300)}},
    "repeats": lambda: {"type": "string", "pattern": "((a{1,100}){1,100}){1,100}"},
    "a long repeat": lambda: {"type": "string", "pattern": "a{100000}"},
    "a long text": lambda: {"type": "string", "maxLength": 1_000_000_000},
    "many items": lambda: {"type": "array", "minItems": 10**9},
    "remainders": lambda: {"type": "integer", "multipleOf": 9_999_991},
    "remainders together": lambda: {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
    "fine remainders": lambda: {"multipleOf": 1e-300},
    "products of patterns": lambda: {"allOf": [{"type": "string", "pattern": f"a.*{n}"} for n in range(30)]},
    "products in properties": lambda: {"allOf": [{"properties": {"a": {"pattern": f"a.*{n}"}}} for n in range(30)]},
    "patterns by name": lambda: {"patternProperties": {"(x{1,1000}){1,1000}": {}}},
    "no pattern": lambda: {"type": "string", "pattern": "secret("},
    "looks around": lambda: {"type": "string", "pattern": "(?=secret)a"},
    "no type": lambda: {"type": "secret"},
    "no properties": lambda: {"type": "object", "properties": 5},
    "no values": lambda: {"enum": []},
    "nothing": lambda: {"type": "string", "minLength": 5, "maxLength": 2},
    "may overlap": lambda: {"oneOf": [{"type": "string"}, {"minLength": 3}]},
    "a format": lambda: {"type": "string", "format": "secret"},
    "options": lambda: {"x-guidance": {"lenient": True}, "type": "object"},
    "nullable": lambda: {"type": "string", "nullable": True},  # at its top
}


@pytest.mark.parametrize("make", NASTY.values(), ids=NASTY)
def test_nasty_schemas_are_refused_without_an_echo(make: Callable[[], Schema]) -> None:
    with pytest.raises(ValueError, match=r"^(can|has|uses|repeats|holds|is) ") as told:
        GrammarCheck().validate(json_schema_grammar(make()))
    assert "secret" not in str(told.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"not": {"type": "string"}},
        {"if": {"type": "string"}, "then": {"minLength": 1}},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"type": "object", "propertyNames": {"maxLength": 3}},
        {"type": "array", "contains": {"type": "string"}},
        {"type": "object", "unevaluatedProperties": False},
        {"type": "object", "minProperties": 2},
    ],
)
def test_what_cannot_be_enforced_is_said_wherever_it_is(schema: Schema) -> None:
    for place in (schema, {"type": "object", "properties": {"a": {"anyOf": [{"items": schema}]}}}):
        with pytest.raises(ValueError, match="cannot enforce"):
            check_schema(place)


def test_keywords_are_only_looked_for_where_they_are_keywords() -> None:
    names = ["not", "if", "uniqueItems", "$ref", "pattern", "format", "x-guidance"]
    schema: Schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": names}
    grammar = json_schema_grammar(schema)
    GrammarCheck().validate(grammar)
    assert accepts(grammar, json.dumps(dict.fromkeys(names, 1)))
    assert accepts(json_schema_grammar({"const": {"not": {"$ref": "#"}}}), '{"not":{"$ref":"#"}}')


def test_a_reference_leads_to_everything_that_it_uses() -> None:
    with pytest.raises(ValueError, match="cannot enforce"):
        check_schema({"hidden": {"deep": {"not": {}}}, "items": {"$ref": "#/hidden/deep"}})
    check_schema({"$defs": {"a/b": {}, "c d": {}}, "anyOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/c%20d"}]})


def test_large_schemas_of_real_life_are_taken() -> None:
    parts: dict[str, Schema] = {
        f"part{n}": {
            "type": "object",
            "properties": {f"field{m}": {"type": "string", "description": "d" * 50} for m in range(20)},
            "required": [f"field{m}" for m in range(10)],
        }
        for n in range(50)
    }
    parts["part0"]["properties"]["tree"] = {"type": "array", "items": {"$ref": "#/$defs/part0"}}
    schema = {"type": "object", "$defs": parts, "properties": {name: {"$ref": f"#/$defs/{name}"} for name in parts}}
    GrammarCheck().validate(json_schema_grammar(schema))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (regex_grammar, "secret("),
        (regex_grammar, "(a{1,1000}){1,1000}"),
        (regex_grammar, "a{99999}"),
        (regex_grammar, "(?<=secret)b"),
        (regex_grammar, "a" * 5000),
        (regex_grammar, "[" * 2000),
        (regex_grammar, "(" * 2000),
        (lark_grammar, "secret{"),
        (lark_grammar, "start: <|secret|>"),
        (lark_grammar, 'start: "a"~1..1000000000'),
        (lark_grammar, 'start: "a"{1,99999}'),
        (lark_grammar, '{"grammars": []}'),
        (lark_grammar, '%llguidance {"no_forcing": false}\nstart: "a"'),
        (lark_grammar, 'start: %json {"uniqueItems": true}'),
        (lark_grammar, "start: %json " + json.dumps(nested(80))),
        (lark_grammar, 'start: %json {"secret":'),
        (lark_grammar, "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(900)) + '\nr900: "a"'),
        (lark_grammar, 'start: R0\nR0: "' + "a" * 20_000 + '"'),
        (lark_grammar, "start: " + "(" * 5000),
        (lark_grammar, "start: secret"),
    ],
)
def test_nasty_texts_are_refused_without_an_echo(make: Callable[[str], str], text: str) -> None:
    with pytest.raises(ValueError, match=r"^(can|cannot|uses|repeats|holds|is|must|names) ") as told:
        GrammarCheck().validate(make(text))
    assert "secret" not in str(told.value)


def test_repeats_are_counted_as_they_multiply() -> None:
    regex_grammar(r"(\{5000\}[{9999}]){2,} a{3}b{4}{5}(c|d{100}){50}")
    for pattern in ("((ab){10}){600}", "x{900}" * 12, "x{200}{200}", "([a-z]{0,101}){100}"):
        with pytest.raises(ValueError, match="copies"):
            regex_grammar(pattern)


def test_choices_are_bounded() -> None:
    for choices in ([], [""], ["a"] * 1001, ["a" * 60_000, "b" * 60_000]):
        with pytest.raises(ValueError, match=r"^(must|can) "):
            choice_grammar(choices)


# -- the check ------------------------------------------------------------------------------------------------------


def test_chains_of_references_and_rules_need_a_deep_stack_and_get_it() -> None:
    """On a usual stack they end the process: llguidance recurses."""
    chain = {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(2000)}
    schema = {"$defs": {**chain, "d2000": {}}, "$ref": "#/$defs/d0"}
    check = GrammarCheck()
    assert asyncio.run(check.run(lambda: json_schema_grammar(schema)))
    check._workers.close()


def test_what_was_valid_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    check = GrammarCheck()
    compiled: list[str] = []
    real = LLMatcher

    class Counting:
        def __new__(cls, tokenizer: Any, grammar: str, **options: Any) -> Any:
            compiled.append(grammar)
            return real(tokenizer, grammar, **options)

    monkeypatch.setattr(llguidance, "LLMatcher", Counting)
    monkeypatch.setattr(grammars, "REMEMBERED", 2)
    for grammar in ('start: "a"', 'start: "a"', 'start: "b"', 'start: "c"', 'start: "a"'):
        check.validate(grammar)
    assert compiled == ['start: "a"', 'start: "b"', 'start: "c"', 'start: "a"']


def test_a_compile_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow() -> str:
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def make() -> str:
            asyncio.run_coroutine_threadsafe(done.wait(), loop).result()
            return 'start: "a"'

        check = GrammarCheck()
        with pytest.raises(ValueError, match="too long"):
            await check.run(make)
        done.set()
        answer = await check.run(lambda: 'start: "b"')
        check._workers.close()
        return answer

    monkeypatch.setattr(grammars, "PATIENCE", 0.2)
    monkeypatch.setattr(grammars, "THREADS", 1)
    assert asyncio.run(slow()) == 'start: "b"'


# -- over HTTP ------------------------------------------------------------------------------------------------------


@served()
async def test_the_engine_gets_the_grammar(site: Site) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"name": "n", "schema": schema, "strict": True, "description": "what it is for"}
    await site.chat(response_format={"type": "json_schema", "json_schema": named}, n=2)
    assert [turn.grammar for turn in site.engine.submitted] == [json_schema_grammar(schema)] * 2
    await site.complete(choice=["a", "b"])
    assert site.engine.submitted[-1].grammar == choice_grammar(["a", "b"])
    await site.chat(response_format={"type": "text"})
    assert site.engine.submitted[-1].grammar is None


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name", None),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "invalid_value"),
        ({"response_format": 5}, "response_format", "invalid_value"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
            "response_format.json_schema.schema",
            "invalid_value",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
            "response_format.json_schema.name",
            "invalid_value",
        ),
        ({"regex": "("}, "regex", "invalid_value"),
        ({"regex": ""}, "regex", "invalid_value"),
        ({"grammar": "start: secret"}, "grammar", "invalid_value"),
        ({"choice": []}, "choice", "invalid_value"),
        ({"choice": ["a", 5]}, "choice[1]", "invalid_value"),
        ({"regex": "a", "choice": ["a"]}, "choice", "invalid_value"),
        ({"guided_xml": {}}, "guided_xml", "unknown_parameter"),
    ],
)
@served()
async def test_refusals_name_the_parameter(site: Site, body: Schema, param: str, code: str | None) -> None:
    for answer in (await site.chat(**body), await site.complete(**body)):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert code is None or error["code"] == code
        assert "secret" not in answer.text
    assert not site.engine.submitted
