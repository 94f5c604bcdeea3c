"""Half of an emoji, escaped within the JSON text of a call's arguments: never an error, and never stored."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from http_context import HELLO, Site, demo_tokens, events, served
from log_kit import as_logged
from template_styles import HERMES, tokens_with

from scheduler.protocol import unpack_ids
from server import surrogates

HALF, MENDED = r'{"a": "\ud83d"}', r'{"a": "\ufffd"}'
hermes = functools.partial(tokens_with, HERMES)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALLS = [{"id": "call_1", "type": "function", "function": {"name": "look", "arguments": HALF}}]
CHAT = [
    *HELLO,
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "call_1", "content": "1"},
]
ITEMS = [
    {"role": "user", "content": "Hello"},
    {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": HALF},
    {"type": "function_call_output", "call_id": "call_1", "output": "1"},
]
TOOL_USE = [
    *HELLO,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "call_1", "name": "look", "input": {"a": "�"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "1"}]},
]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (HALF, MENDED),
        (r'"\udc00"', r'"\ufffd"'),
        (r'"\ud83d\ude00"', r'"\ud83d\ude00"'),  # a whole one
        (r'"\ud83d\ud83d\ude00"', r'"\ufffd\ud83d\ude00"'),
        (r'"\\ud83d"', r'"\\ud83d"'),  # a backslash, and five letters
        (r'"\\\ud83d"', r'"\\\ufffd"'),
        (r'"\uD83Dx\n"', r'"\ufffdx\n"'),
        (r'{"\ud83d": 1}', r'{"\ufffd": 1}'),
        ("no JSON \\", "no JSON \\"),
        ("\\\nud83d", "\\\nud83d"),
    ],
)
def test_halves_are_mended_and_nothing_else_is(text: str, read: str) -> None:
    assert surrogates.mend(text) == read
    told = ""  # and a character at a time
    waiting = ""
    for character in text:
        waiting += character
        settled = surrogates.settled_length(waiting)
        told, waiting = told + surrogates.mend(waiting[:settled]), waiting[settled:]
    assert told + surrogates.mend(waiting) == read


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/chat/completions", {"messages": CHAT, "stream": True}),
        ("/v1/sessions", {"messages": CHAT}),
        ("/v1/responses", {"input": ITEMS}),
        ("/v1/responses/input_tokens", {"input": ITEMS}),
        ("/v1/conversations", {"items": ITEMS}),
        ("/tokenize", {"messages": CHAT}),
        ("/apply-template", {"messages": CHAT}),
        ("/v1/messages", {"messages": TOOL_USE, "max_tokens": 5, "model": "demo"}),
    ],
)
@served(tokens=hermes)
async def test_a_half_in_a_request_is_read_as_the_mark_of_what_is_missing(site: Site, path: str, body: Any) -> None:
    response = await site.http.post(path, json=body)
    assert response.status_code < 300, response.text
    assert '"error":{' not in response.text
    for submit in site.engine.submitted:
        assert "�" in site.engine._tokens.decode(list(prompt_of(submit)))


def prompt_of(submit: Any) -> list[int]:
    return list(unpack_ids(submit.prompt))


@served(tokens=hermes)
async def test_none_is_stored(site: Site) -> None:
    session = (await site.http.post("/v1/sessions", json={"messages": CHAT})).json()["id"]
    stored = (await site.http.get(f"/v1/sessions/{session}/messages")).json()
    assert stored["data"][1]["tool_calls"][0]["function"]["arguments"] == MENDED
    conversation = (await site.http.post("/v1/conversations", json={"items": ITEMS})).json()["id"]
    items = (await site.http.get(f"/v1/conversations/{conversation}/items?order=asc")).json()
    assert items["data"][1]["arguments"] == MENDED
    for path, body in (
        ("/v1/chat/completions", {"messages": HELLO, "session_id": session}),
        ("/v1/responses", {"conversation": conversation, "input": "Go on"}),
    ):
        response = await site.http.post(path, json=body)
        assert response.status_code == 200, response.text


@served(tokens=hermes)
async def test_a_session_that_holds_one_already_works(site: Site) -> None:
    """As earlier versions have stored it."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "call_1", "content": "1"},
    ]
    await site.log.create("default", "old", messages=as_logged(messages))
    for _ in range(2):
        response = await site.chat(session_id="old")
        assert response.status_code == 200, response.text
    assert (await site.http.get("/v1/sessions/old/messages")).status_code == 200
    assert "�" in site.engine._tokens.decode(prompt_of(site.engine.submitted[0]))


def calling(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'


@served(tokens=hermes)
async def test_a_model_that_writes_one(site: Site) -> None:
    """In a stream, as a whole, and in Anthropic's words."""
    site.engine.reply = calling(r'{"a": "\ud83d\ude00\ud83d"}')
    want = r'{"a": "\ud83d\ude00\ufffd"}'
    whole = (await site.chat(tools=[TOOL])).json()["choices"][0]["message"]
    assert whole["tool_calls"][0]["function"]["arguments"] == want
    told = ""
    for chunk in events((await site.chat(tools=[TOOL], stream=True)).text):
        for choice in chunk["choices"] if chunk != "[DONE]" else ():
            for call in choice["delta"].get("tool_calls", ()):
                told += call["function"].get("arguments", "")
    assert told == want
    tool = {"name": "look", "input_schema": {"type": "object"}}
    body = {"messages": HELLO, "tools": [tool], "max_tokens": 500, "model": "demo"}
    (block,) = (await site.http.post("/v1/messages", json=body)).json()["content"]
    assert block["input"] == {"a": "😀�"}


@served(tokens=hermes)
async def test_a_reply_that_ends_within_one(site: Site) -> None:
    beginning = calling(r'{"a": "\ud83d\ude00"}').split(r"e00")[0]
    site.engine.reply = beginning + "e00"
    limit = len(demo_tokens().encode(beginning, special=False))
    answer = (await site.chat(tools=[TOOL], max_tokens=limit)).json()["choices"][0]
    assert answer["finish_reason"] == "length"
    assert answer["message"]["tool_calls"][0]["function"]["arguments"] in (r'{"a": "\ufffd\ud', r'{"a": "\ufffd\u')


@served(tokens=hermes)
async def test_a_model_that_writes_one_in_an_order_of_its_own(site: Site) -> None:
    site.engine.reply = '<tool_call>\n{"arguments": {"a": "\\ud83d"}, "name": "look"}\n</tool_call>'
    response = await site.chat(tools=[TOOL], store=True)
    assert response.status_code == 200, response.text
    call = response.json()["choices"][0]["message"]["tool_calls"][0]["function"]
    assert json.loads(call["arguments"]) == {"a": "�"}


ESCAPED = r"\ud83d"  # six characters: what a field holds once the body has been read
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "string", "pattern": ESCAPED}}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ESCAPED}], "stop": [ESCAPED]}),
        ("/v1/chat/completions", {"messages": HELLO, "store": True, "metadata": {"a": ESCAPED}, "user": ESCAPED}),
        ("/v1/chat/completions", {"messages": HELLO, "tools": [{**TOOL, "function": {"name": "f", "strict": True,
            "description": ESCAPED, "parameters": {"type": "object", "properties": {ESCAPED: {"enum": [ESCAPED]}}}}}]}),
        ("/v1/chat/completions", {"messages": HELLO, "response_format": FORMAT}),
        ("/v1/chat/completions", {"messages": HELLO, "grammar": 'start: "\\ud83d"'}),
        ("/v1/chat/completions", {"messages": HELLO, "grammar": r"start: /\ud83d/"}),
        ("/v1/chat/completions", {"messages": HELLO, "grammar": r'start: %json {"const": "\ud83d"}'}),
        ("/v1/chat/completions", {"messages": HELLO, "grammar": r'start: %json {"properties": {"\ud83d": {}}}'}),
        ("/v1/chat/completions", {"messages": HELLO, "grammar": r'start: %json {"enum": ["a"], "nullable": "\ud83d"}'}),
        ("/v1/chat/completions", {"messages": HELLO, "choice": [ESCAPED]}),
        ("/v1/chat/completions", {"messages": HELLO, "regex": ESCAPED}),
        ("/v1/completions", {"prompt": ESCAPED, "stop": ESCAPED}),
        ("/v1/responses", {"input": [{"type": "reasoning", "encrypted_content": "wt1:" + ESCAPED, "summary": []}]}),
        ("/v1/responses", {"input": "a", "instructions": ESCAPED, "metadata": {"a": ESCAPED}}),
        ("/v1/messages", {"model": "demo", "max_tokens": 5, "system": ESCAPED, "messages": TOOL_USE}),
        ("/v1/sessions/%ED%A0%BD/rewind", {"turns": 1}),
    ],
)  # fmt: skip
@served(tokens=hermes)
async def test_no_other_field_is_an_error_of_the_servers(
    site: Site, path: str, body: Any, caplog: pytest.LogCaptureFixture
) -> None:
    response = await site.http.post(path, json=body)
    assert response.status_code < 500, response.text
    assert all(record.exc_info is None for record in caplog.records)


@served(tokens=hermes)
async def test_whatever_else_holds_one_is_a_line_of_the_log(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were there a field that nobody has thought of."""

    def fails(*given: Any) -> None:
        "\ud83d".encode()

    monkeypatch.setattr("server.api.openai.chat.chat_prompt", fails)
    response = await site.chat()
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_value"
    (record,) = [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert record.exc_info is None
