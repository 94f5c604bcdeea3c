"""Chats with tools and reasoning over HTTP: what is asked of the engine, what the client gets, what the log keeps."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from fake_engine import END
from http_context import HELLO, Site, demo_tokens, events, served
from log_kit import as_logged
from template_styles import HERMES, NO_TOOLS, THINKS, tokens_with

from server.chat.rendering import Rendering
from server.chat.stateful import full_ids

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How it is there.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TWO = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "clock", "arguments": {{}}}}\n</tool_call>'
thinking = functools.partial(tokens_with, THINKS)
hermes = functools.partial(tokens_with, HERMES)
in_words = functools.partial(tokens_with, NO_TOOLS)


def stated(prompt: str, site: Site) -> bool:
    return prompt in site.prompt()


async def message(site: Site, **body: Any) -> dict[str, Any]:
    response = await site.chat(**body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["choices"][0]["message"]
    return found


def collected(chunks: list[Any]) -> dict[str, Any]:
    """What the deltas of a stream add up to, as a client adds them."""
    told: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"] if chunk != "[DONE]" else ():
            delta = choice["delta"]
            told["content"] += delta.get("content") or ""
            told["reasoning_content"] += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(told["tool_calls"]):
                    assert call["id"].startswith("call_")
                    told["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                told["tool_calls"][call["index"]]["arguments"] += call["function"].get("arguments", "")
            told["finish_reason"] = choice["finish_reason"]
    return told


# --- replies ------------------------------------------------------------------------------------------------


@served()
async def test_a_call_is_told_apart_from_the_answer(site: Site) -> None:
    site.engine.reply = TWO
    response = (await site.chat(tools=[WEATHER, CLOCK])).json()
    (choice,) = response["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    names = [
        (c["type"], c["function"]["name"], json.loads(c["function"]["arguments"]))
        for c in choice["message"]["tool_calls"]
    ]
    assert names == [("function", "weather", {"city": "Rome"}), ("function", "clock", {})]
    assert len({c["id"] for c in choice["message"]["tool_calls"]}) == 2
    assert stated('"description": "How it is there."', site)
    site.engine.reply = CALL
    assert (await message(site, tools=[WEATHER]))["content"] is None


@served()
async def test_streamed_calls_add_up(site: Site) -> None:
    site.engine.reply = TWO
    chunks = events((await site.chat(tools=[WEATHER, CLOCK], stream=True)).text)
    told = collected(chunks)
    assert told["content"] == "Let me see."
    assert [(c["name"], json.loads(c["arguments"])) for c in told["tool_calls"]] == [
        ("weather", {"city": "Rome"}),
        ("clock", {}),
    ]
    assert told["finish_reason"] == "tool_calls"
    assert sum("tool_calls" in choice["delta"] for c in chunks[:-1] for choice in c["choices"]) > 5  # as they came


@served()
async def test_without_tools_or_with_a_choice_of_none_nothing_is_a_call(site: Site) -> None:
    site.engine.reply = CALL
    assert (await message(site))["content"] == CALL
    assert (await message(site, tools=[WEATHER], tool_choice="none"))["content"] == CALL
    assert (await message(site, tools=[CLOCK]))["content"] == CALL
    choice = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "clock"}}]},
    }
    assert (await message(site, tools=[WEATHER, CLOCK], tool_choice=choice))["content"] == CALL


@served()
async def test_a_cut_call_ends_for_its_length(site: Site) -> None:
    site.engine.reply = CALL
    response = (
        await site.chat(tools=[WEATHER], max_tokens=len(demo_tokens().encode(CALL[:-20], special=False)))
    ).json()
    (choice,) = response["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city')


@served()
async def test_logprobs_stay_one_entry_a_token(site: Site) -> None:
    site.engine.reply = TWO
    body: dict[str, Any] = {"tools": [WEATHER, CLOCK], "logprobs": True}
    whole = (await site.chat(**body)).json()["choices"][0]["logprobs"]["content"]
    assert len(whole) == len(demo_tokens().encode(TWO, special=False)) + 1
    chunks = events((await site.chat(**body, stream=True)).text)[:-1]
    streamed = [
        e for c in chunks for choice in c["choices"] for e in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == whole


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """A choice that narrows what may be called."""
    named = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


UNENFORCED = {"name": "t", "strict": True, "parameters": {"type": "object", "not": {}}}
FORCED = [
    ("required", [WEATHER, CLOCK]),
    ({"type": "function", "function": {"name": "weather"}}, [WEATHER]),
    (
        allowed("required", "clock"),
        [CLOCK],
    ),
]


@pytest.mark.parametrize(("choice", "tools"), FORCED)
@served()
async def test_a_forced_call_is_a_grammar(site: Site, choice: object, tools: list[dict[str, Any]]) -> None:
    site.engine.reply = CALL
    await site.chat(tools=[WEATHER, CLOCK], tool_choice=choice)
    grammar = site.engine.submitted[-1].grammar
    assert grammar is not None
    names = {tool["function"]["name"] for tool in tools}
    assert {name for name in ("weather", "clock") if f'"{name}\\"' in grammar} == names


@served()
async def test_free_calls_are_not_constrained_unless_something_was_promised(site: Site) -> None:
    async def grammar(**body: Any) -> str | None:
        await site.chat(tools=[WEATHER], **body)
        return site.engine.submitted[-1].grammar

    assert await grammar() is None
    assert await grammar(tool_choice="none", parallel_tool_calls=False) is None
    assert await grammar(parallel_tool_calls=False) is not None
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    await site.chat(tools=[strict])
    assert site.engine.submitted[-1].grammar is not None
    both = await grammar(response_format={"type": "json_object"})
    assert both is not None
    assert "instead" in both


# --- requests that are refused ------------------------------------------------------------------------------

ASKED: dict[str, Any] = {"role": "user", "content": "How is Rome?"}
CALLED: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}
CALLING: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALLED]}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."}
PATCH: dict[str, Any] = {"type": "custom", "custom": {"name": "patch", "description": "Edits."}}
GRAMMAR = "tools[0].custom.format.grammar"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom.name"),
    ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
    ({"tools": [{**PATCH, "function": {"name": "f"}}]}, "tools[0].function"),
    ({"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}}]}, GRAMMAR),
    ({"tools": [PATCH, {"type": "function", "function": {"name": "patch"}}]}, "tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "custom", "custom": {"name": "patch"}}}, "tool_choice.custom.name"),
    ({"tools": [{"type": "mcp", "server_label": "s", "server_url": "http://h"}]}, "tools[0].type"),
    ({"tools": [WEATHER], "tool_choice": {"type": "mcp", "server_label": "s"}}, "tool_choice.type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a" * 129}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": f"t{n}"}} for n in range(4097)]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "clock"}}},
        "tool_choice.function.name",
    ),
    ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": [WEATHER], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
    ({"tools": [{"type": "function", "function": UNENFORCED}]}, "tools[0].function.parameters"),
    ({"tools": [WEATHER], "tool_choice": "auto", "parallel_tool_calls": False, "regex": "a+"}, "regex"),
    ({"functions": []}, "functions"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "none"}, "function_call"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"nonsense": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
    ({"chat_template_args": {"nonsense": 1}}, "chat_template_args"),
    ({"reasoning_history": "some"}, "reasoning_history"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"web_search_options": 1}, "web_search_options"),
    ({"continue_final_message": True}, "messages"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]}, "messages[0].tool_call_id"),
    ({"messages": [ASKED, CALLING, {**RESULT, "tool_call_id": "else"}]}, "messages[2].tool_call_id"),
    ({"messages": [ASKED, CALLING, RESULT, RESULT]}, "messages[3].tool_call_id"),
    ({"messages": [ASKED, CALLING, ASKED, RESULT]}, "messages[3].tool_call_id"),
    ({"messages": [ASKED, {**CALLING, "tool_calls": [CALLED, CALLED]}]}, "messages[1].tool_calls[1].id"),
    ({"messages": [{**ASKED, "tool_calls": [CALLED]}]}, "messages[0].tool_calls"),
    ({"messages": [{**ASKED, "tool_call_id": "a"}]}, "messages[0].tool_call_id"),
    ({"messages": [{**ASKED, "reasoning_content": "Hm."}]}, "messages[0].reasoning_content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (
        {"messages": [{"role": "assistant", "content": "a", "reasoning": "x", "reasoning_content": "y"}]},
        "messages[0].reasoning",
    ),
    (
        {"messages": [{"role": "assistant", "content": "a", "function_call": {"name": "f"}}]},
        "messages[0].function_call",
    ),
    ({"messages": [{"role": "assistant", "content": "a", "prefix": True}, ASKED]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [ASKED, {**CALLING, "tool_calls": [{**CALLED, "type": "custom"}]}]},
        "messages[1].tool_calls[0].function",
    ),
]


@pytest.mark.parametrize(("body", "param"), REFUSED)
@served()
async def test_what_is_wrong_is_named(site: Site, body: dict[str, Any], param: str) -> None:
    response = await site.chat(**body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert site.engine.submitted == []


TAKEN: list[dict[str, Any]] = [
    {"tools": []},
    {"tools": None, "tool_choice": None, "parallel_tool_calls": None, "functions": None, "function_call": None},
    {"tool_choice": "auto"},
    {"tool_choice": "none"},
    {"reasoning_effort": "low"},
    {"reasoning_effort": "max"},
    {"service_tier": "auto"},
    {"prediction": {"type": "content", "content": [{"type": "text", "text": "Hello there"}]}},
    {"safety_identifier": "someone", "user": "someone"},
    {"modalities": ["text"], "verbosity": "medium"},
    {"messages": [{**ASKED, "name": "Ann"}]},
    {"messages": [{"role": "assistant", "content": None, "refusal": "No."}, ASKED]},
    {"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, ASKED]},
    {"messages": [ASKED, CALLING, ASKED]},
    {"messages": [ASKED, {**CALLING, "tool_calls": [{**CALLED, "index": 0}]}, {**RESULT, "name": "weather"}]},
    {"messages": [{"role": "assistant", "content": None, "reasoning": "Hm."}, ASKED]},
]


@pytest.mark.parametrize("body", TAKEN)
@served()
async def test_what_asks_for_nothing_is_taken(site: Site, body: dict[str, Any]) -> None:
    assert (await message(site, **body))["content"] == "Hello there, friend."


@served()
async def test_the_tier_is_told_to_who_asked(site: Site) -> None:
    assert (await site.chat(service_tier="auto")).json()["service_tier"] == "default"
    assert "service_tier" not in (await site.chat()).json()


@served()
async def test_a_stored_chat_is_a_session_with_its_metadata(site: Site) -> None:
    stored = await site.chat(store=True, metadata={"topic": "rome"})
    name = stored.json()["session_id"]
    assert stored.headers["x-session-id"] == name
    shown = (await site.http.get(f"/v1/sessions/{name}")).json()
    assert (shown["metadata"], shown["turns"]) == ({"topic": "rome"}, 1)
    await site.chat(session_id=name, metadata={"topic": "paris"}, stream=True)
    assert (await site.http.get(f"/v1/sessions/{name}")).json()["metadata"] == {"topic": "paris"}
    await site.chat(session_id=name)
    assert (await site.http.get(f"/v1/sessions/{name}")).json()["metadata"] == {"topic": "paris"}
    assert "session_id" not in (await site.chat(store=False, metadata={})).json()
    refused = await site.chat(store=True, n=2)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    nowhere = await site.chat(metadata={"a": "b"})
    assert nowhere.json()["cache"]["adapted"] == [{"rule": "metadata_left_out", "param": "metadata", "count": 1}]
    for verb in ("get", "delete"):
        assert (await getattr(site.http, verb)("/v1/chat/completions/chatcmpl-1")).status_code == 404


# --- conversations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["", "."])
@served(tokens=hermes)
async def test_a_conversation_with_tools_costs_a_session_its_new_tokens_only(site: Site, ends: str) -> None:
    tokens = site.engine._tokens
    site.engine.reply = f"Hm{ends}\n{CALL}"
    first = await message(site, session_id="s", messages=[ASKED], tools=[WEATHER])
    call = first["tool_calls"][0]
    logged = [*site.prompt_ids(), *tokens.encode(f"Hm{ends}\n{CALL}", special=False), END]
    site.engine.reply = "It is sunny."
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Sunny."}
    response = await site.chat(session_id="s", messages=[result])  # the session knows its tools
    assert response.json()["choices"][0]["message"]["content"] == "It is sunny."
    assert site.prompt_ids()[: len(logged)] == logged
    history: list[dict[str, Any]] = [
        ASKED,
        {**CALLING, "content": f"Hm{ends}", "tool_calls": [call]},
        result,
    ]
    assert site.prompt() == tokens.render(
        as_logged(history), generation_prompt=True, rendering=Rendering([plain(WEATHER)])
    )
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == len(logged)
    shown = (await site.http.get("/v1/sessions/s/messages")).json()["data"]
    assert [m["role"] for m in shown] == ["user", "assistant", "tool", "assistant"]
    assert shown[1]["tool_calls"] == [call]
    assert shown[2]["tool_call_id"] == call["id"]
    assert shown[0]["tools"] == [plain(WEATHER)]


def plain(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"parameters": {"type": "object", "properties": {}}, **tool["function"]}
    return {
        "type": "function",
        "function": {key: function[key] for key in ("name", "description", "parameters") if key in function},
    }


@served(tokens=hermes)
async def test_tools_of_a_session_hold_until_others_come(site: Site) -> None:
    site.engine.reply = "Yes."
    await site.chat(session_id="s", messages=[ASKED], tools=[WEATHER])
    await site.chat(session_id="s", messages=[ASKED])
    assert site.prompt_ids()[:40] == site.prompt_ids(0)[:40]
    site.engine.reply = CALL
    assert (await message(site, session_id="s", messages=[ASKED]))["tool_calls"]
    await site.chat(session_id="s", messages=[ASKED], tools=[CLOCK])
    assert stated('"name": "clock"', site)
    assert not stated("How it is there", site)  # rendered anew: the template lists tools in front
    await site.chat(session_id="s", messages=[ASKED], tools=[])
    assert not stated('"name": "clock"', site)
    assert not stated("# Tools", site)
    shown = (await site.http.get("/v1/sessions/s/messages")).json()["data"]
    assert [m["tools"] for m in shown if "tools" in m] == [[plain(WEATHER)], [plain(CLOCK)], []]


@served(tokens=hermes)
async def test_a_result_answers_a_call_of_the_log(site: Site) -> None:
    site.engine.reply = CALL
    call = (await message(site, session_id="s", messages=[ASKED], tools=[WEATHER]))["tool_calls"][0]
    wrong = await site.chat(session_id="s", messages=[RESULT])
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "messages[0].tool_call_id")
    right = {**RESULT, "tool_call_id": call["id"]}
    assert (await site.chat(session_id="s", messages=[right, right])).json()["error"][
        "param"
    ] == "messages[1].tool_call_id"
    assert (await site.chat(session_id="s", messages=[right])).status_code == 200


@served(tokens=hermes)
async def test_a_whole_history_and_a_session_give_one_prompt(site: Site) -> None:
    """Also when the client names its session in a header, and sends everything each time."""
    site.engine.reply = CALL
    named = {"X-Session-ID": "h", "X-Session-Create": "true"}
    call = (await message(site, headers=named, messages=[ASKED], tools=[WEATHER]))["tool_calls"][0]
    history: list[dict[str, Any]] = [ASKED, {**CALLING, "tool_calls": [call]}, {**RESULT, "tool_call_id": call["id"]}]
    response = await site.chat(headers=named, messages=history, tools=[WEATHER])
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > len(site.prompt_ids(0))
    assert response.json()["cache"]["miss"] is None
    assert site.prompt_ids() == full_ids(
        site.engine._tokens,
        as_logged([ASKED, {**CALLING, "content": "", "tool_calls": [call]}, history[2]]),
        Rendering([plain(WEATHER)]),
    )


@served(tokens=hermes)
async def test_another_reply_reads_the_same_prompt_and_may_have_other_tools(site: Site) -> None:
    site.engine.reply = CALL
    call = (await message(site, session_id="s", messages=[ASKED], tools=[WEATHER]))["tool_calls"][0]
    await site.chat(session_id="s", messages=[{**RESULT, "tool_call_id": call["id"]}])
    before = site.prompt_ids()
    assert (await site.http.post("/v1/sessions/s/regenerate", json={})).status_code == 200
    assert site.prompt_ids() == before
    assert (await site.http.post("/v1/sessions/s/regenerate", json={"tools": [CLOCK]})).status_code == 200
    assert stated('"name": "clock"', site)
    shown = (await site.http.get("/v1/sessions/s/messages")).json()["data"]
    assert [m["role"] for m in shown] == ["user", "assistant", "tool", "assistant"]
    assert shown[2]["tools"] == [plain(CLOCK)]


@served(tokens=hermes)
async def test_a_rewind_into_a_call_leaves_what_came_of_it(site: Site) -> None:
    site.engine.reply = f"See: {CALL}"
    whole = await message(site, session_id="s", messages=[ASKED], tools=[WEATHER])
    begins = len(site.prompt_ids())
    inside = len(demo_tokens().encode(f"See: {CALL[:-25]}", special=False))
    for tokens, calls in ((begins + inside, 1), (begins + 2, 0)):
        assert (await site.http.post("/v1/sessions/s/rewind", json={"tokens": tokens})).status_code == 200
        left = (await site.http.get("/v1/sessions/s/messages")).json()["data"][-1]
        assert len(left.get("tool_calls", [])) == calls
        assert "See: ".startswith(left["content"]) or left["content"] == "See:"
        if calls:
            (call,) = left["tool_calls"]
            assert call["id"] == whole["tool_calls"][0]["id"]
            assert '{"city": "Rome"}'.startswith(call["function"]["arguments"])
            assert 0 < len(call["function"]["arguments"]) < len('{"city": "Rome"}')


@served(tokens=hermes)
async def test_a_retry_is_answered_with_the_same_calls(site: Site) -> None:
    site.engine.reply = TWO
    key = {"Idempotency-Key": "k"}
    body: dict[str, Any] = {"session_id": "s", "messages": [ASKED], "tools": [WEATHER, CLOCK]}
    first = (await site.chat(headers=key, **body)).json()
    again = (await site.chat(headers=key, **body)).json()
    assert again["choices"] == first["choices"]
    streamed = collected(events((await site.chat(headers=key, stream=True, **body)).text))
    assert [c["name"] for c in streamed["tool_calls"]] == ["weather", "clock"]
    assert streamed["finish_reason"] == "tool_calls"
    assert len(site.engine.submitted) == 1


@served(tokens=hermes)
async def test_a_session_with_calls_leaves_and_comes_back(site: Site) -> None:
    site.engine.reply = CALL
    await site.chat(session_id="s", messages=[ASKED], tools=[WEATHER], chat_template_kwargs={"enable_thinking": False})
    before = (await site.http.get("/v1/sessions/s/messages")).json()
    capsule = (await site.http.get("/v1/sessions/s/export")).content
    imported = await site.http.post(
        "/v1/sessions/import?id=t", content=capsule, headers={"content-type": "application/zip"}
    )
    assert imported.status_code == 201
    assert (await site.http.get("/v1/sessions/t/messages")).json() == before
    assert before["data"][0]["template"] == {"enable_thinking": False}


@served(tokens=hermes)
async def test_a_session_may_begin_with_calls(site: Site) -> None:
    made = await site.http.post("/v1/sessions", json={"id": "s", "messages": [ASKED, CALLING, RESULT]})
    assert made.status_code == 201
    site.engine.reply = "Sunny, as I said."
    await site.chat(session_id="s", messages=[ASKED])
    assert stated('"arguments": {"city": "Rome"}', site)
    wrong = await site.http.post("/v1/sessions", json={"messages": [ASKED, RESULT]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "messages[1].tool_call_id")


# --- reasoning ----------------------------------------------------------------------------------------------

THOUGHT = "Rome, hm.\n</think>\n\nSunny."


@served(tokens=thinking)
async def test_reasoning_is_split_off_counted_and_streamed(site: Site) -> None:
    site.engine.reply = THOUGHT
    response = (await site.chat()).json()
    told = response["choices"][0]["message"]
    assert (told["content"], told["reasoning_content"]) == ("Sunny.", "Rome, hm.")
    usage = response["usage"]
    thought = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < thought < usage["completion_tokens"]
    assert abs(thought - len(demo_tokens().encode("Rome, hm.\n</think>", special=False))) <= 2
    streamed = collected(events((await site.chat(stream=True)).text))
    assert (streamed["content"], streamed["reasoning_content"]) == ("Sunny.", "Rome, hm.")


@served(tokens=hermes)
async def test_what_a_format_shapes_is_content_from_its_first_word(site: Site) -> None:
    site.engine.reply = '{"a": 1}'
    told = await message(site, response_format={"type": "json_object"})
    assert told["content"] == '{"a": 1}'


@pytest.mark.parametrize("more", [{}, {"tools": [WEATHER]}])
@served(tokens=thinking)
async def test_reasoning_that_the_prompt_opens_comes_before_what_a_format_shapes(
    site: Site, more: dict[str, Any]
) -> None:
    site.engine.reply = 'Hm.\n</think>\n\n{"a": 1}'
    told = await message(site, response_format={"type": "json_object"}, **more)
    assert (told["content"], told["reasoning_content"]) == ('{"a": 1}', "Hm.")
    begun = [ASKED, {"role": "assistant", "content": "It"}]
    site.engine.reply = '{"a": 1}'
    told = await message(site, response_format={"type": "json_object"}, messages=begun, continue_final_message=True)
    assert told["content"] == '{"a": 1}'


@served(tokens=thinking)
async def test_reasoning_stays_in_a_session_or_is_dropped(site: Site) -> None:
    tokens = site.engine._tokens
    site.engine.reply = THOUGHT
    await site.chat(session_id="s", messages=[ASKED])
    logged = [*site.prompt_ids(), *tokens.encode(THOUGHT, special=False), END]
    await site.chat(session_id="s", messages=[ASKED])
    assert site.prompt_ids()[: len(logged)] == logged
    shown = (await site.http.get("/v1/sessions/s/messages")).json()["data"]
    assert [m.get("reasoning_content") for m in shown] == [None, "Rome, hm."] * 2
    await site.chat(session_id="s", messages=[ASKED], reasoning_history="drop")
    assert not stated("Rome, hm.", site)
    assert stated("Sunny.", site)
    shown = (await site.http.get("/v1/sessions/s/messages")).json()["data"]
    assert shown[1]["reasoning_content"] == "Rome, hm."  # the log keeps it


@served(tokens=hermes)
async def test_an_effort_of_none_and_variables_reach_the_template(site: Site) -> None:
    await site.chat(reasoning_effort="none")
    assert stated("<think>\n\n</think>", site)
    off: Any = {"enable_thinking": False}
    for given in ({"chat_template_kwargs": off}, {"chat_template_args": off}):
        await site.chat(**given)
        assert stated("<think>\n\n</think>", site)
    await site.chat(reasoning_effort="high")
    assert not stated("<think>", site)


# --- going on -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", [{"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False}, {}]
)
@served(tokens=in_words)
async def test_a_reply_goes_on_with_what_was_begun(site: Site, how: dict[str, Any]) -> None:
    begun: dict[str, Any] = {"role": "assistant", "content": "It is "}
    if not how:
        begun["prefix"] = True
    site.engine.reply = "sunny."
    for session in ({}, {"session_id": "s"}, {"session_id": "s"}):
        told = await message(site, messages=[ASKED, begun], **how, **session)
        assert told["content"] == "sunny."
        assert site.prompt().endswith("<|im_start|>assistant\nIt is ")
    shown = (await site.http.get("/v1/sessions/s/messages")).json()["data"]
    assert [m["content"] for m in shown] == ["How is Rome?", "It is sunny."] * 2
    assert site.prompt().count("It is sunny.<|im_end|>") == 1


@served()
async def test_a_reply_that_was_begun_is_begun_so_again(site: Site) -> None:
    last = {"role": "assistant", "content": "Well, "}
    await site.chat(session_id="s", messages=[*HELLO, last], continue_final_message=True)
    key = {"Idempotency-Key": "k"}
    for headers in ({}, key, key):
        again = await site.http.post("/v1/sessions/s/regenerate", json={}, headers=headers)
        assert again.json()["choices"][0]["message"]["content"] == "Hello there, friend."
        told = (await site.http.get("/v1/sessions/s/messages")).json()["data"][-1]
        assert (told["content"], told["turn"]) == ("Well, Hello there, friend.", 1)
    record = await site.log.get("default", "s")
    assert record is not None
    assert demo_tokens().decode(record.tokens).count("Well, Hello there, friend.") == 1
    other = await site.http.post("/v1/sessions/s/regenerate", json={"tools": [WEATHER]})  # from another prompt
    assert other.status_code == 200
    record = await site.log.get("default", "s")
    assert record is not None
    assert record.messages[-1].content == "Hello there, friend."
    assert "Well, " not in demo_tokens().decode(record.tokens)


@served(tokens=in_words)
async def test_a_retry_of_a_reply_that_goes_on_says_the_same(site: Site) -> None:
    site.engine.reply = "sunny."
    body: dict[str, Any] = {
        "session_id": "s",
        "messages": [ASKED, {"role": "assistant", "content": "It is "}],
        "continue_final_message": True,
    }
    for _ in range(2):
        response = await site.chat(headers={"Idempotency-Key": "k"}, **body)
        assert response.json()["choices"][0]["message"]["content"] == "sunny."


@pytest.mark.parametrize("last", [{"role": "assistant", "content": ""}, CALLING, ASKED])
@served()
async def test_only_text_can_be_gone_on_with(site: Site, last: dict[str, Any]) -> None:
    response = await site.chat(messages=[ASKED, last], continue_final_message=True)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


@served(tokens=lambda: tokens_with(NO_TOOLS.replace("{{ m.content }}", "{{ m.content | length }}")))
async def test_a_template_that_hides_the_beginning_is_told(site: Site) -> None:
    response = await site.chat(messages=[*HELLO, {"role": "assistant", "content": "x"}], continue_final_message=True)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "continue_final_message")


# --- verbosity ----------------------------------------------------------------------------------------------

SAYS_HOW_MUCH = NO_TOOLS + "{{ verbosity }}"
verbose = functools.partial(tokens_with, SAYS_HOW_MUCH)


@served(tokens=verbose)
async def test_verbosity_reaches_a_template_that_reads_it(site: Site) -> None:
    for level in ("low", "medium", "high"):
        assert (await site.chat(verbosity=level)).status_code == 200
        assert site.prompt().endswith(level)
        response = await site.http.post("/v1/responses", json={"input": "Hello", "text": {"verbosity": level}})
        assert response.status_code == 200, response.text
        assert site.prompt().endswith(level)


@served()
async def test_where_the_template_does_not_read_it_verbosity_is_noted(site: Site) -> None:
    left_out: list[dict[str, Any]] = [{"rule": "verbosity_left_out", "param": "verbosity", "count": 1}]
    for level in ("low", "medium", "high"):
        chat = (await site.chat(verbosity=level)).json()
        assert chat["cache"].get("adapted", []) == (left_out if level != "medium" else [])
        response = await site.http.post("/v1/responses", json={"input": "Hello", "text": {"verbosity": level}})
        noted = response.json()["cache"].get("adapted", [])
        assert [(one["param"], one["count"]) for one in noted] == ([("text.verbosity", 1)] if level != "medium" else [])
        counted = await site.http.post(
            "/v1/responses/input_tokens", json={"input": "Hello", "text": {"verbosity": level}}
        )
        assert counted.status_code == 200


@pytest.mark.parametrize("kind", ["mcp", "shell"])
@served()
async def test_a_tool_of_another_kind_is_refused_by_its_type(site: Site, kind: str) -> None:
    tool = {"type": kind, "server_label": "s", "server_url": "http://host", "name": "n", "format": {"type": "text"}}
    response = await site.chat(tools=[tool])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools[0].type")
    assert "not supported" in response.json()["error"]["message"]
