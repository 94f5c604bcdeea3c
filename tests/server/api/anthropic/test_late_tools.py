"""Deferred tools: out of the prompt until a tool result or a system message names them, and callable from there on."""

from __future__ import annotations

from typing import Any

import pytest
from http_context import Site, served, site
from template_styles import STYLES, tokens_with

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ASKED = {"role": "user", "content": "Weather?"}
SEARCHED = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "search", "input": {}}]}
DONE = {"role": "assistant", "content": "Rain."}
AGAIN = {"role": "user", "content": "And now?"}
ALL = tokens_with(STYLES["strict"])
NONE = tokens_with(STYLES["strict"], rules=())


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "description": f"The {name}.", "input_schema": {"type": "object"}, **fields}


TOOLS = [tool("search"), tool("weather", defer_loading=True), tool("stocks", defer_loading=True)]


def found(*names: str, text: str = "") -> dict[str, Any]:
    references = [{"type": "tool_reference", "tool_name": name} for name in names]
    said = [{"type": "text", "text": text}] if text else []
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [*said, *references]}]}


def change(kind: str, name: str) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": kind, "tool": {"type": "tool_reference", "name": name}}]}


async def message(site: Site, messages: list[Any], status: int = 200, **body: Any) -> Any:
    given = {"max_tokens": 100, "messages": messages, "tools": TOOLS, **body}
    answer = await site.http.post("/v1/messages", json=given)
    assert answer.status_code == status, answer.text
    return answer.json()


@served(tokens=lambda: ALL)
async def test_a_deferred_tool_is_in_the_prompt_where_it_is_found(site: Site) -> None:
    history: list[Any] = [ASKED, SEARCHED]
    await message(site, [ASKED])
    assert "search" in site.prompt()
    assert "weather" not in site.prompt()
    told = await message(site, [*history, found("weather", text="One match.")])
    before, _, behind = site.prompt().partition("One match.")
    assert "The weather." not in before
    assert behind.count('"name": "weather"') == 1
    assert "stocks" not in site.prompt()
    assert {"rule": "tools_in_place", "param": "tools", "count": 1} in told["cache"]["adapted"]
    later = [*history, found("weather", text="One match."), DONE, AGAIN]
    await message(site, later)
    assert site.prompt().startswith(site.prompt(1).removesuffix("<|im_start|>assistant\n"))


@pytest.mark.parametrize("kept", [ALL, NONE], ids=["in place", "in front"])
async def test_it_can_be_called_from_there_on(kept: Any) -> None:
    async with site(tokens=kept) as made:
        made.engine.reply = CALL
        text = await message(made, [ASKED])
        assert [block["type"] for block in text["content"]] == ["text"]
        called = await message(made, [ASKED, SEARCHED, found("weather")])
        assert [(block["type"], block["name"]) for block in called["content"]] == [("tool_use", "weather")]
        forced = {"type": "tool", "name": "weather"}
        await message(made, [ASKED, SEARCHED, found("weather")], tool_choice=forced)
        assert "weather" in (made.engine.submitted[-1].grammar or "")
        await message(made, [ASKED], 400, tool_choice=forced)


@served(tokens=lambda: ALL)
async def test_a_system_message_adds_a_tool_and_takes_it_away(site: Site) -> None:
    site.engine.reply = CALL
    history: list[Any] = [ASKED, change("tool_addition", "weather")]
    called = await message(site, history)
    assert called["content"][0]["type"] == "tool_use"
    assert site.prompt().index("Weather?") < site.prompt().index("The weather.")
    history += [DONE, AGAIN, change("tool_removal", "weather")]
    gone = await message(site, history)
    assert gone["content"][0]["type"] == "text"
    assert "can no longer be called: weather" in site.prompt()
    again = await message(site, [*history, DONE, AGAIN, change("tool_addition", "weather")])
    assert again["content"][0]["type"] == "tool_use"


@served(tokens=lambda: ALL)
async def test_a_tool_at_the_front_can_be_taken_away_and_come_back(site: Site) -> None:
    site.engine.reply = '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'
    history: list[Any] = [ASKED, change("tool_removal", "search")]
    assert (await message(site, history))["content"][0]["type"] == "text"
    history += [DONE, AGAIN, change("tool_addition", "search")]
    assert (await message(site, history))["content"][0]["type"] == "tool_use"


@served(tokens=lambda: ALL)
async def test_a_tool_is_defined_once_and_an_unknown_one_not_at_all(site: Site) -> None:
    twice = [ASKED, SEARCHED, found("weather", "weather"), change("tool_addition", "weather"), DONE, AGAIN]
    await message(site, twice)
    assert site.prompt().count("The weather.") == 1
    gone = await message(site, [ASKED, SEARCHED, found("other", "search")])
    assert site.prompt().count("The search.") == 1
    assert "adapted" not in gone["cache"]


@served(tokens=lambda: NONE)
async def test_with_the_rule_off_it_is_in_front(site: Site) -> None:
    told = await message(site, [ASKED, SEARCHED, found("weather")])
    assert site.prompt().index("The weather.") < site.prompt().index("Weather?")
    assert "adapted" not in told["cache"]


@served(tokens=lambda: ALL)
async def test_a_session_has_it_after_the_turn_that_found_it(site: Site) -> None:
    site.engine.reply = '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'
    first = await message(site, [ASKED], session_id="s")
    result = found("weather")
    result["content"][0]["tool_use_id"] = first["content"][0]["id"]
    site.engine.reply = CALL
    second = await message(site, [result], session_id="s")
    assert second["content"][0]["type"] == "tool_use"
    assert second["cache"]["miss"] is None
    given = {"max_tokens": 100, "messages": [AGAIN], "session_id": "s"}
    third = (await site.http.post("/v1/messages", json=given)).json()
    assert third["content"][0]["type"] == "tool_use"
    assert site.prompt().count("The weather.") == 1


@served(tokens=lambda: NONE)
async def test_a_session_with_the_rule_off_has_it_in_front(site: Site) -> None:
    site.engine.reply = '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'
    first = await message(site, [ASKED], session_id="s")
    result = found("weather")
    result["content"][0]["tool_use_id"] = first["content"][0]["id"]
    await message(site, [result], session_id="s")
    assert site.prompt().index("The weather.") < site.prompt().index("Weather?")


@served(tokens=lambda: ALL)
async def test_blocks_out_of_place_are_refused(site: Site) -> None:
    addition = change("tool_addition", "weather")
    for wrong in (
        {**addition, "role": "user"},
        {"role": "system", "content": [{"type": "tool_addition", "tool": {"type": "mcp_toolset", "name": "x"}}]},
        {"role": "user", "content": [{"type": "tool_reference", "tool_name": "weather"}]},
    ):
        told = await message(site, [ASKED, wrong], 400)
        assert told["error"]["type"] == "invalid_request_error"
