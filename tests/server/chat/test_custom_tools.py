"""Custom tools of chats: text for the client, functions with one argument for the model."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from http_context import HELLO, Site, events, served
from template_styles import HERMES, tokens_with

hermes = functools.partial(tokens_with, HERMES)
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+"}}
PATCH: dict[str, Any] = {"type": "custom", "custom": {"name": "patch", "description": "Edits.", "format": GRAMMAR}}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
TEXT = 'say "hi"\n\u00e9'


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@served(tokens=hermes)
async def test_a_call_has_text_and_the_model_reads_a_function(site: Site) -> None:
    site.engine.reply = call("patch", {"input": TEXT}) + call("clock", {})
    answer = (await site.chat(tools=[PATCH, CLOCK])).json()
    first, second = answer["choices"][0]["message"]["tool_calls"]
    assert first == {"id": first["id"], "type": "custom", "custom": {"name": "patch", "input": TEXT}}
    assert (second["type"], second["function"]["name"]) == ("function", "clock")
    assert {"rule": "grammar_described", "param": "custom", "count": 1} in answer["cache"]["adapted"]
    assert "Edits." in site.prompt()
    assert "regular expression" in site.prompt()


@pytest.mark.parametrize(
    ("arguments", "text"), [({"input": TEXT}, TEXT), ({"text": "only"}, "only"), ({"a": 1, "b": 2}, None), ({}, "{}")]
)
@served(tokens=hermes)
async def test_a_stream_adds_up_to_the_same(site: Site, arguments: Any, text: str | None) -> None:
    site.engine.reply = call("patch", arguments) + call("clock", {})
    told: dict[int, dict[str, Any]] = {}
    for chunk in events((await site.chat(tools=[PATCH, CLOCK], stream=True)).text)[:-1]:
        for delta in chunk["choices"][0]["delta"].get("tool_calls", ()):
            one = told.setdefault(delta["index"], {"input": "", "arguments": ""})
            one |= {key: delta[key] for key in ("id", "type") if key in delta}
            one["input"] += delta.get("custom", {}).get("input", "")
            one["arguments"] += delta.get("function", {}).get("arguments", "")
            one["name"] = one.get("name") or (delta.get("custom") or delta["function"])["name"]
    assert [(one["type"], one["name"]) for one in told.values()] == [("custom", "patch"), ("function", "clock")]
    assert told[0]["input"] == (json.dumps(arguments) if text is None else text)
    assert json.loads(told[1]["arguments"]) == {}


@served(tokens=hermes)
async def test_a_call_comes_back_as_it_was_generated(site: Site) -> None:
    sent = {"id": "call_1", "type": "custom", "custom": {"name": "patch", "input": TEXT}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [sent]},
        {"role": "tool", "tool_call_id": "call_1", "content": "ok"},
    ]
    assert (await site.chat(messages=messages, tools=[PATCH])).status_code == 200
    assert json.dumps({"input": TEXT}, ensure_ascii=False) in site.prompt()


@served(tokens=hermes)
async def test_a_session_that_keeps_its_tools_keeps_their_kind(site: Site) -> None:
    for text, more in (("a", {"tools": [PATCH]}), ("b", {})):
        site.engine.reply = call("patch", {"input": text})
        answer = (await site.chat("/v1/sessions/s/chat/completions", **more)).json()
        (made,) = answer["choices"][0]["message"]["tool_calls"]
        assert made["custom"] == {"name": "patch", "input": text}
