"""What clients of the Responses API send by default is answered: fields that change nothing, and foreign items."""

from __future__ import annotations

from typing import Any

import pytest
import responses_kit
from http_context import Site, served
from msgspec.structs import replace
from openai_document import document
from responses_kit import adapted

from server.api.responses.item_schemas import KINDS, VENDOR_ITEMS
from server.api.responses.tool_schemas import vendor_tool

USER = {"role": "user", "content": "Hello"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
CALL = {"type": "function_call", "call_id": "c1", "name": "view", "arguments": "{}"}
PASSED = {"internal_chat_message_metadata_passthrough": {"turn_id": "t"}, "metadata": {"a": {"b": 1}}, "id": "msg_1"}


async def respond(site: Site, **body: Any) -> Any:
    """A response; its input can be counted too."""
    made = await responses_kit.respond(site, **body)
    unread = {"store", "include", "stream_options", "stream", "service_tier", "max_tool_calls", "safety_identifier"}
    counted = {name: value for name, value in body.items() if name not in unread}
    tokens = await site.http.post("/v1/responses/input_tokens", json=counted)
    assert tokens.json() == {"object": "response.input_tokens", "input_tokens": made["usage"]["input_tokens"]}
    return made


@pytest.mark.parametrize(
    "body",
    [
        {"client_metadata": {"session_id": "s", "x-codex-turn-metadata": "{}", "deep": {"er": [1]}}},
        {"access_programs": {"cyber": {"enabled": True}}},
        {"service_tier": "priority"},
        {"service_tier": "ultrafast"},
        {"service_tier": "one-of-next-year"},
        {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}},
        {"prompt_cache_retention": "24h"},
        {"reasoning": {"summary": "detailed", "context": "all_turns"}},
        {"reasoning": {"summary": "concise", "context": "current_turn", "generate_summary": "concise"}},
        {"max_tool_calls": 3},
        {"safety_identifier": "s"},
        {"include": ["reasoning.encrypted_content", "web_search_call.action.sources"]},
        {"tools": []},
        {"input": [{"type": "message", **USER, **PASSED, "phase": "commentary", "end_turn": True}]},
        {"input": [{**USER, "content": [{"type": "input_text", "text": "Hello", "prompt_cache_breakpoint": {}}]}]},
    ],
)
@served()
async def test_what_changes_nothing_is_taken(site: Site, body: dict[str, Any]) -> None:
    plain = await respond(site, input=[USER])
    asked = site.prompt()
    made = await respond(site, **{"input": [USER], **body})
    assert site.prompt() == asked
    assert made["output"][0]["content"] == plain["output"][0]["content"]
    assert made["service_tier"] == "default"
    assert adapted(made) == []


@served()
async def test_a_streams_options_are_taken(site: Site) -> None:
    options = {"reasoning_summary_delivery": "sequential_cutoff"}
    body = {"input": "Hello", "stream": True, "stream_options": options}
    assert (await site.http.post("/v1/responses", json=body)).status_code == 200


@pytest.mark.parametrize("field", ["client_metadata", "reasoning", "prompt_cache_options"])
@served()
async def test_what_is_taken_has_its_type(site: Site, field: str) -> None:
    answer = await site.http.post("/v1/responses", json={"input": "Hello", field: "text"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


TOOL = {
    "type": "function",
    "name": "f",
    "parameters": {"type": "object", "properties": {}},
}


@served()
async def test_options_of_functions_are_taken(site: Site) -> None:
    await respond(site, input="Hello", tools=[TOOL])
    asked = site.prompt()
    options = {"defer_loading": True, "output_schema": {"type": "object"}, "allowed_callers": ["direct"]}
    made = await respond(site, input="Hello", tools=[{**TOOL, **options}])
    assert site.prompt() == asked
    assert adapted(made) == []
    made = await respond(site, input="Hello", tools=[{**TOOL, "allowed_callers": ["programmatic"]}])
    assert "tools" in asked
    assert site.prompt() != asked
    assert adapted(made) == [("tool_left_out", "programmatic_tool_calling", 1)]


@served()
async def test_reasoning_that_others_have_encrypted_is_dropped(site: Site) -> None:
    thought: dict[str, Any] = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": None,
        "encrypted_content": "gAAAA",
    }
    answer = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]}
    await respond(site, input=[USER, answer, USER])
    asked = site.prompt()
    part = {"type": "reasoning", "content": [{"type": "encrypted_content", "encrypted_content": "gAAAA"}]}
    for given in (thought, part):
        made = await respond(site, input=[USER, given, answer, USER])
        assert site.prompt() == asked
        assert adapted(made) == [("reasoning_dropped", "encrypted_content", 1)]


@pytest.mark.parametrize("type", ["function_call", "custom_tool_call"])
@served()
async def test_images_in_outputs_become_text(site: Site, type: str) -> None:
    call = CALL if type == "function_call" else {"type": type, "call_id": "c1", "name": "view", "input": "x"}
    parts = [{"type": "input_text", "text": "Seen:"}, IMAGE, {"type": "input_file", "file_data": "AA"}]
    output = {"type": f"{type}_output", "call_id": "c1", "output": parts}
    made = await respond(site, input=[USER, call, output])
    assert "Seen:\n[image]\n[file]" in site.prompt()
    assert adapted(made) == [("image_replaced", "output", 1), ("file_replaced", "output", 1)]
    body = {"input": [{"role": "user", "content": [IMAGE]}]}
    answer = await site.http.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0].content[0].image_url")


@pytest.mark.parametrize("type", sorted(VENDOR_ITEMS))
@served()
async def test_items_of_vendors_tools_are_left_out(site: Site, type: str) -> None:
    await respond(site, input=[USER])
    asked = site.prompt()
    item = {"type": type, "id": "x_1", "status": "completed", "action": {"type": "search"}, "result": "AAAA"}
    made = await respond(site, input=[item, USER])
    assert site.prompt() == asked
    assert adapted(made) == [("item_left_out", type, 1)]


@served()
async def test_what_an_agent_wrote_is_read(site: Site) -> None:
    content = [{"type": "input_text", "text": "Look here."}]
    item = {"type": "agent_message", "author": "/root", "recipient": "/root/a", "content": content, **PASSED}
    await respond(site, input=[item])
    assert "Message from /root to /root/a:\nLook here." in site.prompt()


def types_in(name: str, field: str) -> set[str]:
    """The values of ``type`` that the document has below a field of a request."""
    whole = document()["$defs"]

    def refs(shape: Any) -> list[str]:
        if isinstance(shape, dict):
            own = [shape["$ref"].rpartition("/")[2]] if "$ref" in shape else []
            return own + [ref for value in shape.values() for ref in refs(value)]
        return [ref for value in shape for ref in refs(value)] if isinstance(shape, list) else []

    found: set[str] = set()
    for ref in refs(whole[name]["properties"][field]):
        type = whole[ref]["properties"].get("type", {})
        found |= {value for value in (type.get("const"), *type.get("enum", ())) if value}
    return found


def test_every_type_of_the_document_is_known() -> None:
    request = "ResponseCreateParamsNonStreaming"
    ours = {"function", "custom", "namespace", "local_shell"}
    assert {type for type in types_in(request, "tools") if vendor_tool(type) is None} == ours
    assert types_in(request, "input") - KINDS - VENDOR_ITEMS == set()


@served()
async def test_there_can_be_many_tools_with_long_names_and_descriptions(site: Site) -> None:
    assert site.engine.facts is not None
    site.engine.facts = replace(site.engine.facts, max_context=400_000, pages=30_000)
    tools = [{**TOOL, "name": f"{'n' * 120}_{number}", "description": "d" * 20_000} for number in range(3)]
    made = await responses_kit.respond(site, tools=[*tools, *({**TOOL, "name": f"f{n}"} for n in range(200))])
    assert len(made["tools"]) == 203


@served()
async def test_where_all_tools_are_left_out_none_can_be_required(site: Site) -> None:
    body = {"input": "Hello", "tools": [{"type": "web_search"}], "tool_choice": "required"}
    answer = await site.http.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")
