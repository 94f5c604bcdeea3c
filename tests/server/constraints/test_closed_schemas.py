"""Objects are generated with the properties that their schema names, unless it says that there are others."""

from __future__ import annotations

from typing import Any

import pytest

from server.constraints.json_schema import close_schema

NAMED: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
SHUT: dict[str, Any] = {**NAMED, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (NAMED, SHUT),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({"type": "array", "items": NAMED}, {"type": "array", "items": SHUT}),
        (
            {"$defs": {"x": NAMED}, "anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]},
            {"$defs": {"x": SHUT}, "anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]},
        ),
        (
            {"type": "object", "properties": {"b": NAMED}},
            {"type": "object", "properties": {"b": SHUT}, "additionalProperties": False},
        ),
    ],
)
def test_what_is_open_is_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    before = repr(schema)
    assert close_schema(schema) == expected
    assert repr(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "string"},
        {**NAMED, "additionalProperties": True},
        {**NAMED, "additionalProperties": {"type": "string"}},
        {**NAMED, "patternProperties": {"^x": {}}},
        {**NAMED, "required": ["a", "b"]},
        {**NAMED, "required": [{}]},
        {**NAMED, "minProperties": 2},
        {"allOf": [NAMED, {"properties": {"b": {}}}]},
        {**NAMED, "anyOf": [{"properties": {"b": {}}}]},
        {"$defs": {"x": NAMED}, "$ref": "#/$defs/x", "properties": {"b": {}}},
        {"enum": [{"properties": {"a": {}}}]},
        {"const": {"properties": {"a": {}}}},
    ],
)
def test_what_may_be_more_stays_open(schema: dict[str, Any]) -> None:
    assert close_schema(schema) == schema
