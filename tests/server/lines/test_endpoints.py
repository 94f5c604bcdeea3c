"""Lines of the endpoints beside chats: messages without their thinking, responses that are not stored, a WebSocket."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_context import Site, served
from line_kit import CALL, SCHEMA, goes_on, hermes, ids_of, line_of, lines

THOUGHT = "<think>\nSo be it.\n</think>\n\nDone."


class Claude:
    """An agent on Anthropic's API: thinking is omitted, and sent back empty."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.messages: list[dict[str, Any]] = []
        self.user_id = json.dumps({"device_id": "d", "session_id": "s-1"})

    async def ask(self, *content: dict[str, Any], reply: str = THOUGHT) -> dict[str, Any]:
        self.site.engine.reply = reply
        self.messages.append({"role": "user", "content": [*content]})
        body = {
            "max_tokens": 512,
            "system": [{"type": "text", "text": "You write code."}],
            "tools": [{"name": "read", "input_schema": SCHEMA}],
            "thinking": {"type": "adaptive", "display": "omitted"},
            "metadata": {"user_id": self.user_id},
            "messages": self.messages,
        }
        answer = await self.site.http.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        assert all(block["thinking"] == "" for block in told["content"] if block["type"] == "thinking")
        self.messages.append({"role": "assistant", "content": told["content"]})
        return told


@served(tokens=hermes)
async def test_messages_whose_thinking_is_omitted_are_continued_with_it(site: Site) -> None:
    claude = Claude(site)
    first = await claude.ask({"type": "text", "text": "Look."}, reply=CALL)
    call = first["content"][-1]
    second = await claude.ask({"type": "tool_result", "tool_use_id": call["id"], "content": "nothing"})
    assert goes_on(site)
    third = await claude.ask({"type": "text", "text": "Why?"})
    assert goes_on(site)
    assert [line_of(told)["outcome"] for told in (first, second, third)] == ["begun", "continued", "continued"]
    assert line_of(first)["via"] == "metadata.user_id.session_id"
    assert third["cache"]["adapted"][-1] == {"rule": "reasoning_kept", "param": "messages", "count": 2}
    assert "session_id" not in third
    (line,) = await lines(site)
    assert line["turns"] == 3


class Codex:
    """An agent on OpenAI's responses, by HTTP: it stores nothing and sends the items of all responses."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.items: list[dict[str, Any]] = []
        self.instructions = "You write code."

    async def ask(self, *items: dict[str, Any], reply: str = THOUGHT) -> dict[str, Any]:
        self.site.engine.reply = reply
        self.items += items
        body = {
            "instructions": self.instructions,
            "store": False,
            "input": self.items,
            "tools": [{"type": "function", "name": "read", "parameters": SCHEMA, "strict": False}],
            "prompt_cache_key": "thread-1",
        }
        answer = await self.site.http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        self.items += [item for item in told["output"] if item["type"] != "reasoning"]
        return told


@served(tokens=hermes)
async def test_responses_that_are_not_stored_are_continued_from_their_line(site: Site) -> None:
    codex = Codex(site)
    first = await codex.ask({"role": "user", "content": "Look."}, reply=CALL)
    call = first["output"][-1]
    second = await codex.ask({"type": "function_call_output", "call_id": call["call_id"], "output": "nothing"})
    assert goes_on(site)
    third = await codex.ask({"role": "user", "content": "Why?"})
    assert goes_on(site)
    assert [line_of(told)["outcome"] for told in (first, second, third)] == ["begun", "continued", "continued"]
    (line,) = await lines(site)
    assert (line["turns"], line["metadata"]) == (3, {"title": "Look.", "hint": "prompt_cache_key"})
    codex.instructions = "You write prose."
    assert line_of(await codex.ask({"role": "user", "content": "Again"}))["outcome"] == "rewritten"
    prompt = site.engine._tokens.decode(ids_of(site.engine.submitted[-1]))
    assert ("prose" in prompt, "code" in prompt) == (True, False)


@pytest.mark.parametrize("more", [{"store": True}, {"previous_response_id": "x", "store": False}])
@served(tokens=hermes)
async def test_stored_responses_and_those_with_a_predecessor_have_no_line(site: Site, more: dict[str, Any]) -> None:
    first = (await site.http.post("/v1/responses", json={"input": "Hello"})).json()
    if "previous_response_id" in more:
        more = {**more, "previous_response_id": first["id"]}
    answer = await site.http.post("/v1/responses", json={"input": "Hi", "prompt_cache_key": "k", **more})
    assert (answer.status_code, "line" in answer.json()["cache"]) == (200, False)
    assert await lines(site) == []


@served(tokens=hermes)
async def test_a_line_is_continued_by_another_endpoint_of_the_same_client(site: Site) -> None:
    headers = {"x-litellm-session-id": "1"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
    site.engine.reply = "Hi."
    await site.chat(messages=messages, headers=headers)
    messages += [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "More"}]
    answer = await site.http.post("/v1/responses", json={"input": messages, "store": False}, headers=headers)
    assert (line_of(answer.json())["outcome"], line_of(answer.json())["turns"]) == ("continued", 1)
    assert goes_on(site)


@served(tokens=hermes)
async def test_a_thread_is_found_in_the_clients_metadata(site: Site) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
    tools = [{"type": "function", "name": "read", "parameters": SCHEMA, "strict": False}]
    about = {"thread_id": "t1", "x-codex-window-id": "t1:0", "turn": 3}
    body = {"store": False, "tools": tools, "client_metadata": about, "prompt_cache_key": "k"}
    told = (await site.http.post("/v1/responses", json={"input": messages, **body})).json()
    assert (line_of(told)["outcome"], line_of(told)["via"]) == ("begun", "client_metadata.thread_id")
    about["x-codex-window-id"] = "t1:1"
    messages += [*told["output"], {"role": "user", "content": "More"}]
    assert line_of((await site.http.post("/v1/responses", json={"input": messages, **body})).json())["turns"] == 1


@served(tokens=hermes)
async def test_metadata_that_names_a_conversation_is_no_reason_to_refuse_a_chat(site: Site) -> None:
    for name in ("session_id", "sessionId"):
        answer = await site.chat(metadata={name: "s", "promptId": "p"})
        assert (answer.status_code, line_of(answer.json())["via"]) == (200, f"metadata.{name}")
