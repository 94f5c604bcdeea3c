"""Anthropic's messages: requests, answers, streams and errors are theirs; and the official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import msgspec
import pytest
from http_context import Call as Request
from http_context import Site, reply_ids, served
from msgspec import UNSET

from scheduler.protocol import Delta
from server.api.anthropic.reply import AnthropicReply
from server.chat.partial_reply import PartialReply
from server.chat.reply_parser import ArgumentsPiece, CallStart, ContentPiece, Part, ReasoningPiece
from server.engine.engine import TurnRefused
from server.schemas.objects import CachedTokens, Usage
from server.turns.call_deltas import arguments_object
from server.turns.replies import ReplyHead

if TYPE_CHECKING:
    import anthropic  # takes long, and every worker collects this file

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ASKED = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}}]},
]


def told_of(parts: list[list[Part]], shows: bool) -> list[Any]:
    """The events of a stream whose deltas were read as these parts, between its head and its end."""
    reply = AnthropicReply(ReplyHead("msg_1", 0, "m", "fp", UNSET), None, 0, None, shows)
    usage = Usage(1, 1, 2, CachedTokens(0))
    made = [event for some in parts for event in reply.write_delta(0, Delta("t"), some, usage)]
    end = reply.end_choice(0, PartialReply(finish="stop"), usage, None)
    return [msgspec.to_builtins(event) for event in (*made, *end[:-1])]


async def message(site: Site, headers: Any = None, **body: Any) -> Any:
    return await site.http.post("/v1/messages", json={"max_tokens": 512, "messages": HELLO, **body}, headers=headers)


async def events(site: Site, **body: Any) -> list[tuple[str, Any]]:
    """A stream's events: their names and data."""
    response = await message(site, stream=True, **body)
    assert response.status_code == 200, response.text
    blocks = [block for block in response.text.split("\n\n") if block and not block.startswith(":")]
    pairs = [block.split("\n") for block in blocks]
    assert all(len(lines) == 2 for lines in pairs)
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]


@served()
async def test_a_message(site: Site) -> None:
    response = await message(site, system="Be kind.")
    answer = response.json()
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert answer["id"].startswith("msg_")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "demo")
    assert answer["content"] == [{"type": "text", "text": "Hello there, friend.", "citations": None}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    usage = answer["usage"]
    assert usage["output_tokens"] == len(reply_ids()) + 1
    assert usage["input_tokens"] == len(site.prompt_ids(0))
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (0, 0)
    assert "Be kind." in site.prompt()


@served()
async def test_a_stream(site: Site) -> None:
    told = await events(site)
    names = [name for name, _ in told]
    assert names == [data["type"] for _, data in told]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    start = told[0][1]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert start["usage"]["input_tokens"] > 0
    assert "".join(data["delta"]["text"] for _, data in told[3:-3]) == "Hello there, friend."
    assert told[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert told[-2][1]["usage"]["output_tokens"] == len(reply_ids()) + 1


@served()
async def test_why_it_ended(site: Site) -> None:
    whole = (await message(site, stop_sequences=["nobody", "there"])).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "there")
    assert whole["content"][0]["text"].startswith("Hello ")
    told = await events(site, stop_sequences=["there"])
    assert told[-2][1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "there"}
    assert (await message(site, max_tokens=1)).json()["stop_reason"] == "max_tokens"
    nothing = (await message(site, max_tokens=0)).json()
    assert (nothing["content"], nothing["stop_reason"]) == ([], "max_tokens")


@served()
async def test_blocks_become_messages(site: Site) -> None:
    site.engine.reply = "Fine."
    response = await message(
        site,
        system=[{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}],
        tools=[WEATHER],
        messages=[
            *ASKED,
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "Rain"}]},
                    {"type": "text", "text": "And now?"},
                ],
            },
            {"role": "user", "content": "Well?"},
        ],
    )
    assert response.status_code == 200, response.text
    said = site.prompt()
    for text in ("One.\nTwo.", "weather", "Oslo", "Rain", "And now?\nWell?"):
        assert text in said
    assert said.index("Oslo") < said.index("Rain") < said.index("And now?")
    failed = {"type": "tool_result", "tool_use_id": "c1", "content": "no wires", "is_error": True}
    await message(site, tools=[WEATHER], messages=[*ASKED, {"role": "user", "content": [failed]}])
    assert "Error: no wires" in site.prompt()


@served()
async def test_calls(site: Site) -> None:
    site.engine.reply = "Let me see.\n" + CALL
    answer = (await message(site, tools=[WEATHER])).json()
    assert answer["stop_reason"] == "tool_use"
    text, call = answer["content"]
    assert (text["type"], text["text"].strip()) == ("text", "Let me see.")
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Oslo"})
    told = await events(site, tools=[WEATHER])
    starts = [data for name, data in told if name == "content_block_start"]
    assert [(data["index"], data["content_block"]["type"]) for data in starts] == [(0, "text"), (1, "tool_use")]
    assert starts[1]["content_block"]["input"] == {}
    pieces = [
        data["delta"]["partial_json"] for _, data in told if data.get("delta", {}).get("type") == "input_json_delta"
    ]
    assert json.loads("".join(pieces)) == {"city": "Oslo"}
    stops = [data["index"] for name, data in told if name == "content_block_stop"]
    assert stops == [0, 1]
    assert told[-2][1]["delta"]["stop_reason"] == "tool_use"


def test_thoughts_are_blocks_of_their_own() -> None:
    parts: list[list[Part]] = [
        [ReasoningPiece("Hm")],
        [ReasoningPiece(", yes."), ContentPiece("Yes")],
        [ContentPiece("!")],
    ]
    told = told_of(parts, shows=True)
    kinds = [(event["type"], event["index"], event.get("delta", {}).get("type")) for event in told]
    assert kinds == [
        ("content_block_start", 0, None),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
    ]
    assert told[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert [event["delta"]["thinking"] for event in told[1:3]] == ["Hm", ", yes."]
    omitted = told_of(parts, shows=False)
    assert [event["type"] for event in omitted[:3]] == [
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
    ]
    assert "Hm" not in str(omitted)


def test_two_calls_are_two_blocks_and_a_cut_one_is_as_far_as_it_came() -> None:
    parts: list[list[Part]] = [
        [CallStart(0, "a", "f"), ArgumentsPiece(0, "{}"), CallStart(1, "b", "g"), ArgumentsPiece(1, '{"x": [1, 2')]
    ]
    told = told_of(parts, shows=True)
    assert [(event["type"], event["index"]) for event in told] == [
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
    ]
    assert arguments_object('{"x": [1, 2') == {"x": [1, 2]}
    assert arguments_object("[1]") == arguments_object("x") == {}


@served()
async def test_a_forced_call_is_constrained(site: Site) -> None:
    site.engine.reply = CALL
    for choice in (
        {"type": "any"},
        {"type": "tool", "name": "weather"},
        {"type": "auto", "disable_parallel_tool_use": True},
    ):
        assert (await message(site, tools=[WEATHER], tool_choice=choice)).status_code == 200
        assert site.engine.submitted[-1].grammar is not None
    for choice in ({"type": "auto"}, {"type": "none"}):
        assert (await message(site, tools=[WEATHER], tool_choice=choice)).status_code == 200
        assert site.engine.submitted[-1].grammar is None
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    await message(site, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert "integer" in (site.engine.submitted[-1].grammar or "")


@served()
async def test_the_cache_is_read_and_kept(site: Site) -> None:
    marked = [{"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]}]
    first = (await message(site, messages=marked)).json()["usage"]
    assert first["input_tokens"] == 0
    assert first["cache_creation"] == {
        "ephemeral_5m_input_tokens": first["cache_creation_input_tokens"],
        "ephemeral_1h_input_tokens": 0,
    }
    again = (await message(site)).json()["usage"]
    assert again["cache_read_input_tokens"] == first["cache_creation_input_tokens"] - 1
    assert (again["input_tokens"], again["cache_creation_input_tokens"]) == (1, 0)
    await message(site, cache_control={"type": "ephemeral", "ttl": "1h"})
    pins = [submit.keep_until for submit in site.engine.submitted]
    assert pins[1] == 0.0
    assert 3200 < pins[2] - pins[0] < 3500


@served()
async def test_sessions(site: Site) -> None:
    first = await message(site, headers={"X-Session-ID": "s", "X-Session-Create": "true"})
    assert (first.headers["x-session-id"], first.json()["session_id"]) == ("s", "s")
    assert site.engine.submitted[0].session == "s"
    second = await message(site, session_id="s", messages=[{"role": "user", "content": "Again"}])
    assert second.json()["usage"]["cache_read_input_tokens"] > 14
    logged = (await site.http.get("/v1/sessions/s/messages")).json()["data"]
    assert [entry["content"] for entry in logged][::2] == ["Hello", "Again"]
    key = {"Idempotency-Key": "k"}
    one = await message(site, headers=key, session_id="s", messages=HELLO)
    two = await message(site, headers=key, session_id="s", messages=HELLO)
    assert two.headers["idempotent-replayed"] == "true"
    assert two.json()["content"] == one.json()["content"]


@served()
async def test_counting(site: Site) -> None:
    body = {"messages": HELLO, "system": "Be kind.", "tools": [WEATHER]}
    count = (await site.http.post("/v1/messages/count_tokens?beta=true", json=body)).json()
    await message(site, **body)
    assert count == {"input_tokens": len(site.prompt_ids(0))}
    assert len(site.engine.submitted) == 1
    await message(site, headers={"X-Session-ID": "s", "X-Session-Create": "true"})
    more = {"session_id": "s", "messages": HELLO}
    stateful = (await site.http.post("/v1/messages/count_tokens", json=more)).json()["input_tokens"]
    assert (
        stateful > (await site.http.post("/v1/messages/count_tokens", json={"messages": HELLO})).json()["input_tokens"]
    )


SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 1}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is required"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type names a kind"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text is required"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1"}]}]},
        "messages[0].content[0].tool_use_id is not that of a call",
    ),
    (
        {
            "messages": [
                *ASKED,
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "x"},
                        {"type": "tool_result", "tool_use_id": "c1"},
                        {"type": "tool_result", "tool_use_id": "c1"},
                    ],
                },
            ]
        },
        "messages[2].content[2].tool_use_id",
    ),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"system": 5}, "system"),
    ({"temperature": 1.5}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"tools": [{"type": "nonsense", "name": "x"}]}, "tools[0].type names a kind"),
    ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice asks for a tool that this server cannot run"),
    (
        {"tools": [SEARCH, WEATHER], "tool_choice": {"type": "tool", "name": "web_search"}},
        "tool_choice names a tool that this server cannot run",
    ),
    (
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "none"}]}},
        "context_management.edits[0].keep",
    ),
    (
        {
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
            "output_format": {"type": "json_schema", "schema": {"type": "object"}},
        },
        "output_format differs",
    ),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [WEATHER, WEATHER]}, "tools must have different names"),
    ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "max_tokens must be more than"),
    ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}}, "schema"),
    ({"container": "x"}, "container is not supported"),
    ({"n": 2}, "n is not a parameter"),
    ({"metadata": {"user": "x"}}, "metadata.user"),
]


@pytest.mark.parametrize(("body", "said"), BAD, ids=[said for _, said in BAD])
@served()
async def test_bad_requests(site: Site, body: dict[str, Any], said: str) -> None:
    response = await message(site, **body)
    assert response.status_code == 400, response.text
    error = response.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert said in error["error"]["message"]
    assert error["request_id"] == response.headers["request-id"]
    assert (await message(site)).status_code == 200


@served({"ann": "key-a"})
async def test_keys_and_errors_are_anthropics(site: Site) -> None:
    body = {"max_tokens": 5, "messages": HELLO}
    for headers, status in (
        ({"x-api-key": "key-a", "anthropic-version": "2023-06-01"}, 200),
        ({"authorization": "Bearer key-a"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"authorization": "Bearer wrong", "x-api-key": "key-a"}, 401),
        ({}, 401),
    ):
        assert (await site.http.post("/v1/messages", json=body, headers=headers)).status_code == status
    twice = [("x-api-key", "key-a"), ("x-api-key", "key-a")]
    refused = await site.http.post("/v1/messages", json=body, headers=twice)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    key = {"x-api-key": "key-a"}
    missing = await site.http.post("/v1/messages/batches", json={}, headers=key)
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    other = await message(site, headers=key, model="other")
    assert (other.status_code, other.json()["error"]["type"]) == (404, "not_found_error")
    site.engine.refusal = TurnRefused("queue_full", "The queue is full.", 3)
    full = await message(site, headers=key)
    assert (full.status_code, full.headers["retry-after"], full.json()["error"]["type"]) == (
        429,
        "3",
        "rate_limit_error",
    )
    site.engine.draining = True
    assert (await message(site, headers=key)).json()["error"]["type"] == "overloaded_error"
    assert "param" in (await site.http.post("/v1/embeddings", json={}, headers=key)).json()["error"]


@served()
async def test_a_stream_that_fails_says_so(site: Site) -> None:
    site.engine.ends_badly = RuntimeError("a secret")
    call = Request.post(site.app, "/v1/messages", {"max_tokens": 9, "messages": HELLO, "stream": True})
    await call.finish()
    last = call.body.decode().strip().split("\n\n")[-1]
    name, data = last.split("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert error["error"] == {"type": "api_error", "message": "The server failed on this request."}
    assert error["request_id"] == call.headers["request-id"]


@asynccontextmanager
async def client(site: Site, key: str = "key-a") -> AsyncIterator[anthropic.AsyncAnthropic]:
    """The official client over the app, without a socket and without retries."""
    import anthropic

    transport: Any = httpx2.ASGITransport(site.app)
    async with httpx2.AsyncClient(transport=transport) as http:
        yield anthropic.AsyncAnthropic(api_key=key, base_url="http://warm", http_client=http, max_retries=0)


@served({"ann": "key-a"})
async def test_the_official_client(site: Site) -> None:
    messages: Any = HELLO
    tools: Any = [WEATHER]
    async with client(site) as ai:
        whole = await ai.messages.create(model="demo", max_tokens=512, messages=messages)
        assert whole.content[0].type == "text"
        assert whole.content[0].text == "Hello there, friend."
        count = await ai.messages.count_tokens(model="demo", messages=messages)
        assert count.input_tokens == whole.usage.input_tokens
        site.engine.reply = "One moment.\n" + CALL
        async with ai.messages.stream(model="demo", max_tokens=512, messages=messages, tools=tools) as stream:
            told = [event.type async for event in stream]
            final = await stream.get_final_message()
        assert {"text", "input_json", "message_stop"} <= set(told)
        assert final.stop_reason == "tool_use"
        assert final.content[1].type == "tool_use"
        assert final.content[1].input == {"city": "Oslo"}
        result: Any = {"type": "tool_result", "tool_use_id": final.content[1].id, "content": "Rain"}
        history: Any = [
            *messages,
            {"role": "assistant", "content": final.content},
            {"role": "user", "content": [result]},
        ]
        site.engine.reply = "It rains."
        answer = await ai.beta.messages.create(model="demo", max_tokens=512, messages=history, tools=tools)
        assert answer.content[0].type == "text"
        assert answer.content[0].text == "It rains."


@served({"ann": "key-a"})
async def test_the_official_clients_errors(site: Site) -> None:
    import anthropic

    messages: Any = HELLO
    async with client(site, "wrong") as ai:
        with pytest.raises(anthropic.AuthenticationError):
            await ai.messages.create(model="demo", max_tokens=5, messages=messages)
    async with client(site) as ai:
        with pytest.raises(anthropic.NotFoundError):
            await ai.messages.create(model="other", max_tokens=5, messages=messages)
        with pytest.raises(anthropic.BadRequestError, match="temperature") as wrong:
            await ai.messages.create(model="demo", max_tokens=5, messages=messages, extra_body={"temperature": 9})
        assert wrong.value.request_id
        site.engine.ends_badly = RuntimeError("x")
        with pytest.raises(anthropic.APIError, match="The server failed"):
            async with ai.messages.stream(model="demo", max_tokens=512, messages=messages) as stream:
                await stream.get_final_message()


@served({"ann": "key-a"})
async def test_the_official_tool_runner_falls_back_to_whole_conversations(site: Site) -> None:
    """It begins with a ``thread``, and goes on without one where the error has the code that it knows."""
    import anthropic

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """Tells the weather.

        Args:
            city: Where.
        """
        site.engine.reply = f"Rain in {city}."
        return "rain"

    site.engine.reply = CALL
    sent: list[dict[str, Any]] = []

    async def note(request: httpx2.Request) -> None:
        sent.append(json.loads(request.content))

    async with client(site) as ai:
        ai._client.event_hooks["request"].append(note)
        runner = ai.beta.messages.tool_runner(
            model="demo", max_tokens=200, messages=[{"role": "user", "content": "Weather?"}], tools=[weather]
        )
        final = await runner.until_done()
    assert [block.text for block in final.content if block.type == "text"] == ["Rain in Oslo."]
    assert ["thread" in body for body in sent] == [True, False, False]
    refused = await message(site, {"x-api-key": "key-a"}, thread={"type": "create"})
    assert refused.status_code == 400
    assert refused.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}
    other = await message(site, {"x-api-key": "key-a"}, temperature=9)
    assert "details" not in other.json()["error"]


# --- limits beyond the context --------------------------------------------------------------------------------


@served()
async def test_max_tokens_beyond_the_context_is_lowered_and_the_receipt_says_so(site: Site) -> None:
    told = await message(site, max_tokens=4096)
    assert told.status_code == 200, told.text
    left = 2048 - told.json()["cache"]["prompt_tokens"]
    assert site.engine.submitted[-1].stopping.max_tokens == left
    assert told.json()["cache"]["max_tokens"] == left
    assert (await message(site, max_tokens=left)).json()["cache"].keys().isdisjoint({"max_tokens", "ignored"})
    streamed = await events(site, max_tokens=4096)
    assert next(data for name, data in streamed if name == "message_delta")["cache"]["max_tokens"] == left


@served()
async def test_a_reply_that_fills_the_context_says_so(site: Site) -> None:
    site.engine.ids = [7] * 3000
    told = (await message(site, max_tokens=4096)).json()
    assert told["stop_reason"] == "model_context_window_exceeded"
    assert told["usage"]["output_tokens"] == told["cache"]["max_tokens"]


@served()
async def test_a_prompt_that_fills_the_context_is_refused_still(site: Site) -> None:
    said = [{"role": "user", "content": "word " * 4000}]
    answer = await message(site, max_tokens=4096, messages=said)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    chat = await site.chat(max_tokens=4096)
    assert chat.status_code == 400
    assert chat.json()["error"]["code"] == "context_length_exceeded"


@served()
async def test_the_turn_of_a_session_keeps_what_its_receipt_told(site: Site) -> None:
    told = (await message(site, max_tokens=4096, session_id="s")).json()
    turns = (await site.http.get("/v1/sessions/s/turns")).json()
    assert turns["data"][0]["cache"]["max_tokens"] == told["cache"]["max_tokens"]
