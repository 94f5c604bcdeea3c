"""Schemas as libraries write them: rewritten to what a grammar enforces, or left out where nothing was promised."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_context import HELLO, Site, served
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from server.constraints import grammars
from server.constraints.enforceable import enforceable, lenient
from server.constraints.grammars import GrammarCheck, json_schema_grammar, lark_grammar
from server.constraints.json_schema import check_schema
from server.constraints.patterns import looks_around

Schema = dict[str, Any]
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(grammars._Bytes(()))), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = [*text.encode()]
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def within(schema: Schema) -> Schema:
    return {"type": "object", "properties": {"v": schema}, "required": ["v"]}


INT32, NAMES = {"type": "integer", "format": "int32"}, {"$defs": {"E": {"enum": ["a", "b"], "type": "string"}}}
NUMBERS = {"type": "object", "additionalProperties": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (INT32, ["2147483647", "-2147483648"], ["2147483648", "-2147483649", "1.5"]),
        ({**INT32, "minimum": 0.5, "maximum": 2**40}, ["1", "2147483647"], ["0", "2147483648"]),
        ({"type": ["number", "null"], "format": "uint8"}, ["0", "255", "null"], ["256", "-1", "0.5"]),
        ({"type": "string", "format": "int64"}, ['"12"'], ["12"]),
        ({"type": "string", "format": "path"}, ['"/etc/hosts"', '"a b"'], ["1"]),
        ({"type": "string", "format": "binary", "maxLength": 2}, ['"ab"'], ['"abc"']),
        ({"type": "number", "format": "double"}, ["0.5"], ['"a"']),
        ({"type": "string", "format": "byte"}, ['"YWI="', '""', '"YWJj"'], ['"YWI"', '"a b="']),
        ({"type": "string", "nullable": True}, ['"a"', "null"], ["1"]),
        ({"type": "string", "nullable": False}, ['"a"'], ["null"]),
        ({"type": "string", "enum": ["a"], "nullable": True}, ['"a"', "null"], ['"b"']),
        ({"$ref": "#/$defs/E", "nullable": True}, ['"a"', "null"], ['"c"']),
        ({"anyOf": [{"type": "integer"}], "nullable": True}, ["1", "null"], ['"c"']),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, ["[1,1]"], ['["a"]']),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, ["[1]", "[]"], ["[1,1]"]),
        (
            {"type": "array", "items": {"$ref": "#/$defs/E"}, "uniqueItems": True},
            ["[]", '["b"]', '["a","b"]'],
            ['["a","a"]'],
        ),
        (
            {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 1, "maxItems": 2},
            ['["c"]', '["a","c"]'],
            ["[]", '["a","b","c"]', '["a","a"]'],
        ),
        ({**NUMBERS, "propertyNames": {"type": "string"}}, ['{"x":1}'], ['{"x":"y"}']),
        ({**NUMBERS, "propertyNames": {"$ref": "#/$defs/E"}}, ["{}", '{"a":1,"b":2}'], ['{"c":1}', '{"a":"b"}']),
        ({**NUMBERS, "propertyNames": {"const": "x"}}, ['{"x":1}'], ['{"y":1}']),
        ({**NUMBERS, "propertyNames": {"pattern": "^a+$"}}, ['{"aa":1}'], ['{"b":1}', '{"a":"b"}']),
        ({**NUMBERS, "propertyNames": {"minLength": 2, "maxLength": 3}}, ['{"ab":1}'], ['{"a":1}', '{"abcd":1}']),
        (
            {"type": "object", "properties": {"a": {"const": 1}, "z": {}}, "propertyNames": {"enum": ["a", "b"]}},
            ['{"a":1,"b":"x"}'],
            ['{"z":1}', '{"a":2}'],
        ),
        ({"type": "string", "pattern": DECIMAL}, ['"1.5"', '"-.5"', '"+7"'], ['""', '"+."', '"."', '"1.5.1"', '"a"']),
        (
            {"type": "string", "pattern": r"^(?=.*\d)(?=.*[A-Z])\w{3,5}$"},
            ['"aB1"', '"1Bcde"'],
            ['"ab1"', '"ABC"'],
        ),
        ({"type": "string", "pattern": r"^(?!\s*$).+"}, ['" a"', '"b "'], ['""', '" "']),
        (
            {"type": "string", "pattern": r"^(?!con|nul$|a\.b)[a-z.]+$"},
            ['"co"', '"cobn"', '"c"', '"nu"', '"nulla"', '"a.c"', '"axb"', '"xcon"'],
            ['""', '"con"', '"cond"', '"nul"', '"a.b"', '"a.bc"'],
        ),
        ({"type": "string", "pattern": r"^(?=a|b)[a-c]+$", "allOf": [{"minLength": 2}]}, ['"bc"'], ['"b"', '"ca"']),
        ({"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]}, ["1.5", '"1"'], ['"+"', "true"]),
        ({"type": "string", "pattern": r"^[^\x{0}-\x{40}\x{42}-\x{D7FF}\x{E000}-\x{10FFFF}]$"}, ['"A"'], ['"\ue000"']),
    ],
)
def test_other_words_for_what_can_be_enforced(schema: Schema, good: list[str], bad: list[str]) -> None:
    whole = {**within(schema), **NAMES}
    for grammar in (json_schema_grammar(whole), lark_grammar(f"start: %json {json.dumps(whole)}")):
        GrammarCheck().validate(grammar)
        for text in good:
            assert accepts(grammar, f'{{"v":{text}}}'), text
        for text in bad:
            assert not accepts(grammar, f'{{"v":{text}}}'), text


CANNOT: dict[str, Schema] = {
    "uniqueItems": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "propertyNames": {**NUMBERS, "properties": {"a": {}}, "propertyNames": {"pattern": "^a+$"}},
    "format": {"type": "string", "format": "ipvanyaddress"},
    "not": {"type": "string", "not": {"const": "a"}},
    "look-around": {"type": "string", "pattern": "(?=a)a"},
    "oneOf": {"oneOf": [{"type": "string"}, {"minLength": 3}]},
    "minProperties": {"type": "object", "minProperties": 2},
    "regular expression": {"type": "string", "pattern": "(?P<n>a)(?P=n)"},
    "$ref": {"$ref": "#/$defs/none"},
}


@pytest.mark.parametrize(("keyword", "schema"), CANNOT.items(), ids=CANNOT)
def test_what_cannot_be_is_named(keyword: str, schema: Schema) -> None:
    with pytest.raises(ValueError, match=keyword.replace("$", r"\$")):
        GrammarCheck().validate(json_schema_grammar(within(schema)))


def test_what_is_rewritten_is_not_the_clients_own() -> None:
    schema = within({"type": "string", "nullable": True, "format": "path"})
    before = json.dumps(schema)
    check_schema(enforceable(schema))
    lenient(schema)
    assert json.dumps(schema) == before


def test_what_looks_around_is_found_where_it_does() -> None:
    assert all(looks_around(pattern) for pattern in (DECIMAL, "a(?=b)", "(?<=a)b", "(?<!a)b", r"\ba"))
    assert not any(looks_around(pattern) for pattern in (r"\(?=a", r"(?:a)", "(?P<n>a)", r"\\b"))


# -- over HTTP --------------------------------------------------------------------------------------------------------


def tool(schema: Schema, **more: Any) -> dict[str, Any]:
    parameters = {**within(schema), "properties": {"v": schema, "n": {"type": "integer"}}}
    return {"type": "function", "function": {"name": "look", "parameters": parameters, **more}}


LEFT_OUT = {"look-around": "pattern", "regular expression": "pattern", "$ref": "parameters"}


@served()
async def test_what_is_enforced_in_full_is_not_told(site: Site) -> None:
    response = await site.chat(tools=[tool({"type": "string", "pattern": DECIMAL})], tool_choice="required")
    assert "adapted" not in response.json()["cache"]


@served()
async def test_what_two_tools_lose_is_counted(site: Site) -> None:
    other = tool({"type": "array", "uniqueItems": True, "items": {"not": {}}})
    other["function"]["name"] = "other"
    tools = [tool(CANNOT["uniqueItems"]), other]
    told = (await site.chat(tools=tools, tool_choice="required")).json()["cache"]["adapted"]
    assert {(each["param"], each["count"]) for each in told} == {("uniqueItems", 2), ("not", 1)}


@pytest.mark.parametrize(("keyword", "schema"), CANNOT.items(), ids=CANNOT)
@served()
async def test_a_tool_that_is_not_strict_is_called_all_the_same(site: Site, keyword: str, schema: Schema) -> None:
    for more in ({"tool_choice": "required"}, {"parallel_tool_calls": False}):
        response = await site.chat(tools=[tool(schema)], **more)
        assert response.status_code == 200, response.text
        grammar = site.engine.submitted[-1].grammar
        assert grammar is not None
        if keyword != "$ref":
            assert '"integer"' in grammar, "the rest of its schema holds"
        [told] = response.json()["cache"]["adapted"]
        assert told == {"rule": "keyword_not_enforced", "param": LEFT_OUT.get(keyword, keyword), "count": 1}
    body = {"messages": HELLO, "tools": [{"name": "look", "input_schema": tool(schema)["function"]["parameters"]}]}
    answer = await site.http.post(
        "/v1/messages", json={**body, "max_tokens": 5, "model": "demo", "tool_choice": {"type": "any"}}
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("keyword", "schema"), CANNOT.items(), ids=CANNOT)
@served()
async def test_a_promise_that_cannot_be_kept_is_refused_by_its_keyword(
    site: Site, keyword: str, schema: Schema
) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": within(schema)}}
    for body, param in (
        ({"tools": [tool(schema, strict=True)]}, "tools[0].function.parameters"),
        ({"tools": [tool(schema, strict=True)], "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"response_format": named}, "response_format.json_schema.schema"),
    ):
        response = await site.chat(**body)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert keyword in error["message"]
    assert site.engine.submitted == []


@served()
async def test_a_strict_tool_beside_one_that_is_not(site: Site) -> None:
    loose = tool(CANNOT["uniqueItems"])
    loose["function"]["name"] = "other"
    assert (await site.chat(tools=[tool({"type": "string"}, strict=True), loose])).status_code == 200
    assert site.engine.submitted[-1].grammar is not None
