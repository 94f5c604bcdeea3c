"""What clients of Anthropic's API send by default is answered: what asks for nothing, tools that only Anthropic runs,
blocks that its tools leave in a history, and what a tool's result has beside text."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FACTS
from http_context import Site, served
from msgspec import structs

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {"name": "weather", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
PLAIN = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "All of it."}}
FOUND = {"type": "search_result", "source": "a", "title": "Title", "content": [{"type": "text", "text": "Found."}]}
CALLED: list[dict[str, Any]] = [
    *HELLO,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": {}}]},
]


async def message(site: Site, **body: Any) -> Any:
    answer = await site.http.post("/v1/messages?beta=true", json={"max_tokens": 9, "messages": HELLO, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def adapted(told: Any) -> list[tuple[str, str]]:
    """The rules of a receipt, with what they were applied to."""
    return [(entry["rule"], entry.get("param", "")) for entry in told["cache"].get("adapted", [])]


@pytest.mark.parametrize(
    "body",
    [
        {"safeguards": []},
        {"betas": ["a"], "context_hint": {"a": 1}, "fallbacks": [{"model": "b"}], "inference_geo": "eu"},
        {"speed": "fast"},
        {"service_tier": "priority"},
        {"diagnostics": {"previous_message_id": None}},
        {"metadata": {"user_id": "u" * 4000}},
        {"mcp_servers": [], "container": None},
        {"tool_choice": {"type": "auto"}},
        {"tool_choice": {"type": "none"}, "tools": []},
        {"thinking": {"type": "adaptive", "display": "omitted", "block_binding": "x"}},
        {"thinking": {"type": "adaptive", "display": "updates"}},
        {"output_config": {"effort": "high", "task_budget": {"type": "tokens", "total": 1}}},
        {"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "scope": "global"}}]},
        {"tools": [{**WEATHER, "eager_input_streaming": True, "input_examples": [{}], "allowed_callers": ["direct"]}]},
        {"tools": [{**WEATHER, "name": "n" * 128, "description": "d" * 200_000}]},
        {"tools": [{**WEATHER, "name": f"t{number}"} for number in range(300)]},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [*HELLO, {"role": "assistant", "content": []}, *HELLO]},
    ],
)
@served()
async def test_what_asks_for_nothing_is_taken(site: Site, body: dict[str, Any]) -> None:
    site.engine.facts = structs.replace(FACTS, max_context=1_000_000)
    told = await message(site, **body)
    assert told["content"][0]["text"] == "Hello there, friend."
    assert "context_management" not in told


@pytest.mark.parametrize("keep", ["all", {"type": "all"}])
@served()
async def test_edits_that_keep_everything_are_none(site: Site, keep: Any) -> None:
    body = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": keep}]}}
    assert (await message(site, **body))["context_management"] == {"applied_edits": []}
    answer = await site.http.post("/v1/messages", json={"max_tokens": 9, "messages": HELLO, "stream": True, **body})
    assert '"context_management":{"applied_edits":[]}' in answer.text


@served()
async def test_output_format_is_honoured(site: Site) -> None:
    await message(site, output_format={"type": "json_schema", "schema": {"type": "object"}})
    assert site.engine.submitted[-1].grammar


@served()
async def test_tools_that_only_anthropic_runs_are_left_out(site: Site) -> None:
    told = await message(site, tools=[SEARCH, WEATHER, {"type": "tool_search_tool_bm25_20251119", "name": "t"}])
    assert adapted(told) == [
        ("tool_left_out", "web_search_20250305"),
        ("tool_left_out", "tool_search_tool_bm25_20251119"),
    ]
    assert "weather" in site.prompt()
    assert "web_search" not in site.prompt()
    await message(site, tools=[SEARCH], tool_choice={"type": "auto"})


@pytest.mark.parametrize(
    ("kind", "field"),
    [("bash_20250124", "restart"), ("text_editor_20250728", "old_str"), ("memory_20250818", "new_path")],
)
@served()
async def test_tools_whose_input_is_known_by_their_type_can_be_called(site: Site, kind: str, field: str) -> None:
    await message(site, tools=[{"type": kind, "name": "given"}])
    assert "given" in site.prompt()
    assert field in site.prompt()


@pytest.mark.parametrize(
    ("block", "text", "rule"),
    [
        (PNG, "[image]", "image_replaced"),
        (PDF, "[document]", "document_replaced"),
        (PLAIN, "All of it.", None),
        (FOUND, "Title\nFound.", None),
    ],
)
@served()
async def test_what_a_result_has_beside_text_is_replaced(site: Site, block: Any, text: str, rule: str | None) -> None:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "Here:"}, block]}
    told = await message(site, messages=[*CALLED, {"role": "user", "content": [result]}])
    assert f"Here:\n{text}" in site.prompt()
    assert adapted(told) == ([] if rule is None else [(rule, "tool_result")])
    beside = [{"type": "tool_result", "tool_use_id": "c1", "content": "Here:"}, block]
    await message(site, messages=[*CALLED, {"role": "user", "content": beside}])
    assert text in site.prompt()


@served()
async def test_an_image_of_the_user_is_refused_by_name(site: Site) -> None:
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": [PNG]}]}
    answer = await site.http.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("messages[0].content[0].type names a kind of content")


@served()
async def test_what_other_servers_have_left_in_a_history_is_left_out(site: Site) -> None:
    said = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
        {"type": "text", "text": "Found it.", "citations": [{"type": "web_search_result_location"}]},
    ]
    told = await message(site, messages=[*HELLO, {"role": "assistant", "content": said}, *HELLO])
    assert "Found it." in site.prompt()
    assert [rule for rule, _ in adapted(told)] == ["block_left_out"] * 3


@pytest.mark.parametrize("kind", [[], {}, 1, None])
@served()
async def test_a_type_that_is_no_text_is_refused(site: Site, kind: Any) -> None:
    block = {"type": kind, "text": "x"}
    for content in ([block], [{"type": "tool_result", "tool_use_id": "c1", "content": [block]}]):
        body = {"max_tokens": 9, "messages": [*CALLED, {"role": "user", "content": content}]}
        assert (await site.http.post("/v1/messages", json=body)).status_code == 400
    body = {"max_tokens": 9, "messages": HELLO, "tools": [{**WEATHER, "type": kind or 1}]}
    assert (await site.http.post("/v1/messages", json=body)).status_code == 400


@served()
async def test_a_compaction_that_failed_is_left_out(site: Site) -> None:
    block = {"type": "compaction", "content": None, "encrypted_content": "x"}
    said = [block, {"type": "text", "text": "Found it."}]
    told = await message(site, messages=[*HELLO, {"role": "assistant", "content": said}, *HELLO])
    assert site.prompt().count("Hello") == 2
    assert adapted(told) == [("block_left_out", "compaction")]


@served(any_model=True, aliases=["haiku"])
async def test_any_name_is_the_served_model(site: Site) -> None:
    assert adapted(await message(site, model="claude-haiku-4-5")) == [("model_aliased", "model")]
    assert adapted(await message(site, model="haiku")) == []
    assert adapted(await message(site, model="demo")) == []
    listed = (await site.http.get("/v1/models")).json()["data"]
    assert [entry["id"] for entry in listed] == ["demo", "haiku"]
    assert (await site.http.get("/v1/models/haiku")).json()["id"] == "haiku"
    assert (await site.http.get("/v1/models/other")).status_code == 404


@served(aliases=["haiku"])
async def test_other_names_are_refused_where_only_its_own_are_taken(site: Site) -> None:
    await message(site, model="haiku")
    answer = await site.http.post("/v1/messages", json={"max_tokens": 9, "messages": HELLO, "model": "other"})
    assert answer.status_code == 404


@served()
async def test_models_are_listed_in_the_shape_of_who_asks(site: Site) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    page = (await site.http.get("/v1/models?limit=1000&beta=true", headers=headers)).json()
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "demo", "demo")
    assert (page["data"][0]["type"], page["data"][0]["display_name"]) == ("model", "demo")
    assert (await site.http.get("/v1/models/demo", headers=headers)).json()["type"] == "model"
    assert (await site.http.get("/v1/models")).json()["object"] == "list"


@served({"ann": "key-a"})
async def test_who_looks_whether_somebody_answers_hears_yes(site: Site) -> None:
    assert (await site.http.head("/")).status_code == 200
    assert (await site.http.get("/")).status_code == 401
