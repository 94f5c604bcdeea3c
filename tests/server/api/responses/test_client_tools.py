"""Tools of every kind that a client runs: functions for the model, and items of their own kind for the client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_context import Site, served
from openai_document import faults, stream_faults
from responses_kit import adapted, respond, says

from server.api.responses.client_tools import LONGEST, ToolKey, ToolNames
from server.api.responses.tool_schemas import VENDOR_TOOLS
from server.schemas.custom_input import InputStream, arguments_with, input_of

GRAMMAR = 'start: "+" /.+/'
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "They help.",
    "tools": [
        {"type": "function", "name": "spawn", "description": "Starts one.", "parameters": {"type": "object"}},
        {"type": "custom", "name": "tell"},
    ],
}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {"type": "object"}}
SHELL = {"type": "local_shell"}
TOOLS: list[dict[str, Any]] = [PATCH, AGENTS, SEARCH, SHELL]
INPUT = '*** Begin\n"a" \\ b'
WIDE = '*** Begin\n"é" \\ 😀'


CALLS: list[tuple[str, str, dict[str, Any]]] = [
    (
        "apply_patch",
        arguments_with(INPUT),
        {"type": "custom_tool_call", "name": "apply_patch", "input": INPUT},
    ),
    (
        "agents__spawn",
        '{"n": 1}',
        {"type": "function_call", "namespace": "agents", "name": "spawn", "arguments": '{"n": 1}'},
    ),
    (
        "agents__tell",
        '{"input": "go"}',
        {"type": "custom_tool_call", "namespace": "agents", "name": "tell", "input": "go"},
    ),
    (
        "apply_patch",
        '{"patch": "x"}',
        {"type": "custom_tool_call", "name": "apply_patch", "input": "x"},
    ),
    (
        "tool_search",
        '{"query": "mail"}',
        {"type": "tool_search_call", "execution": "client", "arguments": {"query": "mail"}},
    ),
    (
        "local_shell",
        '{"command": ["ls", "-l"], "timeout_ms": 50}',
        {
            "type": "local_shell_call",
            "action": {
                "type": "exec",
                "command": ["ls", "-l"],
                "env": {},
                "timeout_ms": 50,
            },
        },
    ),
]
AS_TOLD = [call for call in CALLS if 'patch":' not in call[1]]  # with the argument that the model was told of
OUTPUTS: dict[str, dict[str, Any]] = {
    "custom_tool_call": {"type": "custom_tool_call_output", "output": "Done."},
    "function_call": {"type": "function_call_output", "output": "Done."},
    "tool_search_call": {"type": "tool_search_output", "execution": "client", "status": "completed", "tools": []},
    "local_shell_call": {"type": "local_shell_call_output", "output": "Done."},
}


@pytest.mark.parametrize(("name", "arguments", "item"), CALLS)
@pytest.mark.parametrize("stream", [False, True])
@served()
async def test_a_call_is_an_item_of_its_tools_kind(
    site: Site, stream: bool, name: str, arguments: str, item: dict[str, Any]
) -> None:
    says(site, (name, arguments))
    if stream:
        answer = await site.http.post("/v1/responses", json={"input": "Go", "tools": TOOLS, "stream": True})
        assert not stream_faults("ResponseStreamEvent", answer.text, done=False)
        told = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n") if line.startswith("data")]
        (made,) = told[-1]["response"]["output"]
        begun, done = (next(e for e in told if e["type"] == f"response.output_item.{end}") for end in ("added", "done"))
        assert done["item"] == made
        assert {begun["item"][key] for key in ("id", "call_id", "type")} == {made["id"], made["call_id"], made["type"]}
        if made["type"] == "custom_tool_call":
            deltas = [e["delta"] for e in told if e["type"] == "response.custom_tool_call_input.delta"]
            (whole,) = (e["input"] for e in told if e["type"] == "response.custom_tool_call_input.done")
            assert "".join(deltas) == whole == made["input"]
            assert len(deltas) > 1 or len(whole) == 1
    else:
        (made,) = (await respond(site, tools=TOOLS))["output"]
    assert {key: made.get(key) for key in item} == item
    assert made["status"] == "completed"


@pytest.mark.parametrize(("name", "arguments", "item"), [call for call in CALLS if 'patch":' not in call[1]])
@served()
async def test_a_call_that_comes_back_is_rendered_as_it_was_generated(
    site: Site, name: str, arguments: str, item: dict[str, Any]
) -> None:
    says(site, (name, arguments))
    first = await respond(site, "Go", tools=TOOLS, store=False)
    (made,) = first["output"]
    result = {**OUTPUTS[made["type"]], "call_id": made["call_id"]}
    again: Any = [{"role": "user", "content": "Go"}, made, result]
    second = await respond(site, again, tools=TOOLS, store=False)
    assert site.prompt().startswith(site.prompt(0))
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - 1


@pytest.mark.parametrize(("name", "arguments", "item"), AS_TOLD)
@served()
async def test_the_log_keeps_what_kind_of_call_it_was(
    site: Site, name: str, arguments: str, item: dict[str, Any]
) -> None:
    says(site, (name, arguments))
    first = await respond(site, "Go", tools=TOOLS)
    (made,) = first["output"]
    result = {**OUTPUTS[made["type"]], "call_id": made["call_id"]}
    second = await respond(site, [result], tools=TOOLS, previous_response_id=first["id"])
    listed = (await site.http.get(f"/v1/responses/{second['id']}/input_items")).json()
    assert not faults("ResponseItemList", listed)
    assert [one["type"] for one in listed["data"]] == [result["type"]]
    references = [{"type": "item_reference", "id": id} for id in (made["id"], listed["data"][0]["id"])]
    third = await respond(site, [{"role": "user", "content": "Go"}, *references], tools=TOOLS, store=False)
    assert third["usage"]["input_tokens"] == second["usage"]["input_tokens"]


@served()
async def test_what_a_tool_is_told_to_the_model(site: Site) -> None:
    made = await respond(site, tools=TOOLS)
    text = site.prompt()
    for piece in ("apply_patch", "Edits files.", "Lark grammar", "agents__spawn", "Starts one.", "They help."):
        assert text.count(piece) == 1, piece
    assert [tool["type"] for tool in made["tools"]] == [tool["type"] for tool in TOOLS]
    assert adapted(made) == [("grammar_described", "custom", 1)]


@served()
async def test_tool_choice_names_tools_as_the_client_does(site: Site) -> None:
    for choice, name in (
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "spawn", "namespace": "agents"}, "agents__spawn"),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]},
            "apply_patch",
        ),
    ):
        made = await respond(site, tools=TOOLS, tool_choice=choice)
        assert made["tool_choice"] == choice
        assert name in (site.engine.submitted[-1].grammar or "")
        assert "tool_search" not in (site.engine.submitted[-1].grammar or "")
    bad = {"input": "x", "tools": TOOLS, "tool_choice": {"type": "function", "name": "apply_patch"}}
    assert (await site.http.post("/v1/responses", json=bad)).json()["error"]["param"] == "tool_choice.name"


@pytest.mark.parametrize("type", sorted(VENDOR_TOOLS | {"web_search_preview_2025_03_11", "computer_use_preview"}))
@served()
async def test_a_tool_that_only_a_vendor_runs_is_left_out(site: Site, type: str) -> None:
    base = type.partition("_preview")[0]
    options = {} if type == "tool_search" else {"server_url": "http://host", "anything": {"more": 1}}
    tool = {"type": type, **options}
    made = await respond(site, tools=[tool, {"type": "function", "name": "f"}])
    assert adapted(made) == [("tool_left_out", base, 1)]
    assert [one["type"] for one in made["tools"]] == ["function"]
    assert type not in site.prompt()
    body = {"input": "x", "tools": [tool], "tool_choice": {"type": type}}
    answer = await site.http.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice.type")


@served()
async def test_a_call_cannot_be_required_where_only_a_vendor_runs_the_tools(site: Site) -> None:
    tools = [{"type": "mcp", "server_label": "docs", "server_url": "https://example.com"}]
    answer = await site.http.post("/v1/responses", json={"input": "x", "tools": tools, "tool_choice": "required"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "tool_choice"
    assert error["message"] == "tool_choice asks for a call, and tools has none that this server can call."


@served()
async def test_of_allowed_tools_the_vendors_are_left_out(site: Site) -> None:
    choice: dict[str, Any] = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp", "server_label": "s"}]}
    body = {"input": "x", "tools": TOOLS, "tool_choice": choice}
    answer = await site.http.post("/v1/responses", json=body)
    assert answer.json()["error"]["param"] == "tool_choice.tools[0].type"
    choice["tools"] += [{"type": "custom", "name": "apply_patch"}]
    assert ("tool_left_out", "mcp", 1) in adapted(await respond(site, tools=TOOLS, tool_choice=choice))


def test_names_are_told_apart_and_found_again() -> None:
    keys = [
        ToolKey("fc", "a__b"),
        ToolKey("fc", "b", "a"),
        ToolKey("ctc", "b", "a__"),
        ToolKey("fc", "x" * 60, "mcp__server"),
        ToolKey("fc", "x" * 59 + "y", "mcp__server"),
        ToolKey("tsc", "tool_search"),
        ToolKey("fc", "tool_search"),
    ]
    names = ToolNames(keys)
    told = [names.name(key) for key in keys]
    assert len({*told}) == len(keys)
    assert [names.key(name) for name in told] == keys
    assert all(len(name) <= LONGEST for name in told)
    assert ToolNames(keys[1:2]).name(keys[1]) == ToolNames().name(keys[1]) == "a__b"


@pytest.mark.parametrize(
    ("arguments", "input"),
    [
        (arguments_with(WIDE), WIDE),
        (json.dumps({"input": WIDE}), WIDE),
        ('{"input": "a\nb"}', "a\nb"),
        ('{"input": ""}', ""),
        ('{"patch": "a"}', "a"),
        ('{"input": "a", "more": 1}', "a"),
        ('{"more": 1, "input": "a"}', "a"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "\\ud83d', ""),
        ('{"input": 5}', '{"input": 5}'),
        ("free text", "free text"),
        ("", ""),
    ],
)
def test_the_input_is_what_the_pieces_of_it_are(arguments: str, input: str) -> None:
    assert input_of(arguments) == input
    for size in (1, 2, 7, 1000):
        stream = InputStream()
        told = "".join(stream.feed(arguments[at : at + size]) for at in range(0, len(arguments), size))
        assert told == (input if stream.begun else "")
