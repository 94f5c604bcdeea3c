"""Edits of a request's history: which tool results and which reasoning they leave out, and when."""

from __future__ import annotations

from typing import Any

import pytest
from http_context import Site, served

CLEARED = "[Old tool result content cleared]"


def used(number: int, name: str = "look") -> list[dict[str, Any]]:
    """One tool use with its result."""
    use = {"type": "tool_use", "id": f"c{number}", "name": name, "input": {"n": number}}
    result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": f"result {number}" + " word" * 40}
    thought = {"type": "thinking", "thinking": f"thought {number}", "signature": ""}
    return [{"role": "assistant", "content": [thought, use]}, {"role": "user", "content": [result]}]


TALK = [{"role": "user", "content": "Go"}, *(one for number in range(5) for one in used(number, "ab"[number % 2]))]


async def message(site: Site, *edits: dict[str, Any], status: int = 200, **body: Any) -> Any:
    asked = {"max_tokens": 9, "messages": TALK, "context_management": {"edits": [*edits]}, **body}
    answer = await site.http.post("/v1/messages", json=asked)
    assert answer.status_code == status, answer.text
    return answer.json()


def uses(**fields: Any) -> dict[str, Any]:
    trigger = {"type": "input_tokens", "value": 10}
    return {"type": "clear_tool_uses_20250919", "trigger": trigger, **fields}


def kept(site: Site) -> list[int]:
    """The results that the model reads."""
    return [number for number in range(5) if f"result {number}" in site.prompt()]


@served()
async def test_the_newest_results_are_kept(site: Site) -> None:
    told = await message(site, uses())
    assert kept(site) == [2, 3, 4]
    assert site.prompt().count(CLEARED) == 2
    (applied,) = told["context_management"]["applied_edits"]
    assert (applied["type"], applied["cleared_tool_uses"]) == ("clear_tool_uses_20250919", 2)
    counted = await site.http.post("/v1/messages/count_tokens", json={"messages": TALK})
    assert applied["cleared_input_tokens"] == counted.json()["input_tokens"] - told["cache"]["prompt_tokens"]
    assert '"n": 0' in site.prompt()


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({"keep": {"type": "tool_uses", "value": 0}}, []),
        ({"keep": {"type": "tool_uses", "value": 9}}, [0, 1, 2, 3, 4]),
        ({"keep": {"type": "tool_uses", "value": 1}, "exclude_tools": ["a"]}, [0, 2, 4]),
        ({"trigger": {"type": "input_tokens", "value": 100_000}}, [0, 1, 2, 3, 4]),
        ({"trigger": {"type": "tool_uses", "value": 4}}, [2, 3, 4]),
        ({"trigger": {"type": "tool_uses", "value": 5}}, [0, 1, 2, 3, 4]),
        ({"clear_at_least": {"type": "input_tokens", "value": 100_000}}, [0, 1, 2, 3, 4]),
    ],
)
@served()
async def test_when_and_what_it_clears(site: Site, fields: dict[str, Any], left: list[int]) -> None:
    told = await message(site, uses(**fields))
    assert kept(site) == left
    assert bool(told["context_management"]["applied_edits"]) == (len(left) < 5)


@pytest.mark.parametrize(("chosen", "left"), [(True, [2, 3, 4]), (["b"], [0, 2, 3, 4]), (False, [0, 1, 2, 3, 4])])
@served()
async def test_inputs_are_cleared_where_that_is_asked_for(site: Site, chosen: Any, left: list[int]) -> None:
    await message(site, uses(clear_tool_inputs=chosen))
    assert [number for number in range(5) if f'"n": {number}' in site.prompt()] == left


@served()
async def test_reasoning_of_older_replies_is_left_out(site: Site) -> None:
    edit = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}}
    told = await message(site, edit)
    assert told["context_management"]["applied_edits"][0]["cleared_thinking_turns"] == 3
    assert (await message(site, {**edit, "keep": "all"}))["context_management"] == {"applied_edits": []}
    both = await message(site, edit, uses())
    assert [one["type"] for one in both["context_management"]["applied_edits"]] == [
        "clear_thinking_20251015",
        "clear_tool_uses_20250919",
    ]


@served()
async def test_tokens_are_counted_after_the_edits(site: Site) -> None:
    whole = (await site.http.post("/v1/messages/count_tokens", json={"messages": TALK})).json()["input_tokens"]
    body = {"messages": TALK, "context_management": {"edits": [uses()]}}
    counted = (await site.http.post("/v1/messages/count_tokens", json=body)).json()
    assert counted["context_management"] == {"original_input_tokens": whole}
    told = await message(site, uses())
    assert counted["input_tokens"] == told["cache"]["prompt_tokens"] < whole


@served()
async def test_a_history_that_is_too_long_fits_after_its_edits(site: Site) -> None:
    long = [*TALK[:2], {"role": "user", "content": [{**TALK[2]["content"][0], "content": "word " * 3000}]}, *TALK[3:]]
    body = {"max_tokens": 9, "messages": long}
    assert (await site.http.post("/v1/messages", json=body)).status_code == 400
    await message(site, uses(), messages=long)
    assert kept(site) == [2, 3, 4]


@pytest.mark.parametrize(
    "edit",
    [
        {"type": "nonsense"},
        {"type": "clear_tool_uses_20250919", "keep": {"type": "input_tokens", "value": 1}},
        {"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": -1}},
        {"type": "clear_thinking_20251015", "keep": "none"},
        {"type": "clear_thinking_20251015", "keep": {"type": "tool_uses", "value": 1}},
    ],
)
@served()
async def test_other_edits_are_refused_by_name(site: Site, edit: dict[str, Any]) -> None:
    error = (await message(site, edit, status=400))["error"]["message"]
    assert error.startswith("context_management.edits[0].")
