"""What clients of other servers send with every chat is taken: switches of reasoning reach the template, the rest
changes nothing; a tool message's pictures are named in brackets."""

from __future__ import annotations

from typing import Any

import pytest
from http_context import HELLO, Site, served
from pydantic import ValidationError

from server.schemas.messages import ChatMessageParam
from server.schemas.requests import ChatRequest

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
LOOK = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize(
    "body",
    [
        {"usage": {"include": True}, "provider": {"order": ["a"]}, "transforms": ["middle-out"]},
        {"num_ctx": 8192, "id_slot": -1},
        {"options": {"num_ctx": 8192, "num_keep": 4}},
        {"vl_high_resolution_images": True},
        {"service_tier": "priority"},
        {"stream_options": {"include_usage": True}},
        {"max_tokens": -1},
        {"max_tokens": 9, "max_completion_tokens": 7},
        {"metadata": {"sessionId": "a", "promptId": "b"}},
        {"cache_control": {"type": "ephemeral"}},
        {"verbosity": "low"},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{**HELLO[0], "cache_control": {"type": "ephemeral"}, "id": "m1"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"a": 1}}]}]},
        {"messages": [*HELLO, {"role": "assistant", "content": None}, *HELLO]},
        {"messages": [*HELLO, {"role": "assistant", "content": "x", "reasoning_details": [{"a": 1}]}, *HELLO]},
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "tool_calls": [{**CALL, "extra_content": {"google": {}}}]},
                {"role": "tool", "tool_call_id": "c1", "content": []},
            ],
            "tools": [{**LOOK, "cache_control": {"type": "ephemeral"}}],
        },
    ],
)
@served()
async def test_what_changes_nothing_is_taken(site: Site, body: dict[str, Any]) -> None:
    answer = await site.chat(**body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "reasoning_text"])
def test_a_replys_reasoning_has_one_of_three_names(field: str) -> None:
    message = ChatMessageParam.model_validate({"role": "assistant", "content": "x", field: "Hm."})
    assert message.plain().reasoning_content == "Hm."
    with pytest.raises(ValidationError, match="only allowed in assistant messages"):
        ChatMessageParam.model_validate({"role": "user", "content": "x", field: "Hm."})


def test_two_reasonings_of_one_reply_are_refused() -> None:
    with pytest.raises(ValidationError, match="differs from reasoning_content"):
        ChatMessageParam.model_validate({"role": "assistant", "reasoning_content": "a", "reasoning_text": "b"})


@served()
async def test_the_smaller_limit_holds(site: Site) -> None:
    await site.chat(max_tokens=9, max_completion_tokens=7)
    assert site.engine.submitted[-1].stopping.max_tokens == 7


@pytest.mark.parametrize(
    ("fields", "effort", "reasons", "limit"),
    [
        ({"enable_thinking": False}, "none", False, None),
        ({"enable_thinking": True}, None, True, None),
        ({"thinking": {"type": "disabled"}}, "none", False, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, None, True, ("thinking.budget_tokens", 5)),
        ({"think": False}, "none", False, None),
        ({"think": "high"}, "high", True, None),
        ({"reasoning": {"effort": "low", "max_tokens": 9}}, "low", None, ("reasoning.max_tokens", 9)),
        ({"reasoning": {"enabled": False}}, "none", False, None),
        ({"reasoning_effort": "high", "reasoning": {"effort": "low"}}, "high", None, None),
    ],
)
def test_every_switch_of_reasoning_means_one_thing(
    fields: dict[str, Any], effort: str | None, reasons: bool | None, limit: tuple[str, int] | None
) -> None:
    body = ChatRequest.model_validate({"messages": HELLO, **fields})
    assert (body.effort, body.reasons, body.thinking_limit) == (effort, reasons, limit)


@served()
async def test_pictures_that_a_tool_gave_back_are_named(site: Site) -> None:
    called = {"role": "assistant", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "Here:"}, PICTURE]}
    answer = await site.chat(messages=[*HELLO, called, result], tools=[LOOK])
    assert answer.json()["cache"]["adapted"] == [{"rule": "image_replaced", "param": "tool", "count": 1}]
    prompt = site.prompt()
    assert "Here:\n[image]" in prompt
    assert (await site.chat(messages=[{"role": "user", "content": [PICTURE]}])).status_code == 400


@served()
async def test_reasoning_among_the_parts_of_a_reply_is_its_reasoning(site: Site) -> None:
    said = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Yes."}]
    body = ChatRequest.model_validate({"messages": [*HELLO, {"role": "assistant", "content": said}, *HELLO]})
    assert (body.messages[1].thought, body.messages[1].plain().content) == ("Hm.", "Yes.")


@served()
async def test_tools_that_only_a_vendor_runs_are_left_out(site: Site) -> None:
    answer = await site.chat(tools=[LOOK, {"type": "web_search_preview"}])
    assert {"rule": "tool_left_out", "param": "web_search_preview", "count": 1} in answer.json()["cache"]["adapted"]
    assert (await site.chat(tools=[{"type": "nonsense"}])).status_code == 400
    searched = await site.chat(web_search=True)
    assert searched.json()["cache"]["adapted"] == [{"rule": "tool_left_out", "param": "web_search", "count": 1}]
    assert "adapted" not in (await site.chat(web_search=False)).json()["cache"]
    options = await site.chat(options={"temperature": 0})
    assert options.json()["error"]["param"] == "options.temperature"
