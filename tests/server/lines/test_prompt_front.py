"""A client that changes what stands in front of its history continues its line: billing line, tools in another order,
system messages in the middle, tools that come late."""

from __future__ import annotations

from typing import Any

from http_context import Site, served
from template_styles import STYLES, tokens_with

from scheduler.protocol import unpack_ids

STRICT = tokens_with(STYLES["strict"])
HINT = {"x-claude-code-session-id": "5b1e"}
USER = {"role": "user", "content": "How is Rome?"}
LEFT = {"role": "system", "content": "900 tokens left"}
CALL = '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "description": f"The {name}.", "input_schema": {"type": "object"}, **fields}


def goes_on(site: Site) -> bool:
    """Whether the last prompt begins with the one before and what was replied to it."""
    before, last = (list(unpack_ids(submit.prompt)) for submit in site.engine.submitted[-2:])
    reply = STRICT.encode(site.engine.reply, special=False)
    return last[: len(before) + len(reply)] == before + reply


async def message(site: Site, number: int, messages: list[Any], names: str) -> Any:
    """Message ``number`` of a client whose tools come in the order of ``names``."""
    lines = [f"x-anthropic-billing-header: cc_version=2.1; cch={number};", "Be brief."]
    body = {
        "max_tokens": 50,
        "system": [{"type": "text", "text": text} for text in lines],
        "messages": messages,
        "tools": [*map(tool, names.split()), tool("weather", defer_loading=True)],
    }
    answer = await site.http.post("/v1/messages", json=body, headers=HINT)
    assert answer.status_code == 200, answer.text
    return answer.json()


@served(tokens=lambda: STRICT)
async def test_messages_go_on_from_their_line(site: Site) -> None:
    site.engine.reply = CALL
    first = await message(site, 1, [USER, LEFT], "search time")
    found = [{"type": "tool_reference", "tool_name": "weather"}]
    result = {"type": "tool_result", "tool_use_id": first["content"][0]["id"], "content": found}
    history = [USER, LEFT, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    second = await message(site, 2, [*history, LEFT], "time search")
    assert goes_on(site)
    assert second["cache"]["line"]["outcome"] == "continued"
    assert second["cache"]["adapted"] == [
        {"rule": "billing_line_folded", "param": "system", "count": 1},
        {"rule": "tools_in_first_order", "param": "tools", "count": 1},
        {"rule": "system_in_place", "param": "messages", "count": 1},
        {"rule": "tools_in_place", "param": "tools", "count": 1},
    ]
    more = [{"role": "assistant", "content": second["content"]}, {"role": "user", "content": "And Oslo?"}]
    third = await message(site, 3, [*history, LEFT, *more], "search time")
    assert goes_on(site)
    assert third["cache"]["miss"] is None


@served(tokens=lambda: STRICT)
async def test_responses_go_on_from_theirs(site: Site) -> None:
    history: list[Any] = [{"type": "message", "role": "user", "content": "How is Rome?"}]
    for number in (1, 2):
        body = {
            "input": history,
            "instructions": f"x-anthropic-billing-header: cch={number};\nBe brief.",
            "store": False,
            "tools": [{"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": False}],
        }
        answer = await site.http.post("/v1/responses", json=body, headers={"thread-id": "t"})
        assert answer.status_code == 200, answer.text
        history += [*answer.json()["output"], {"type": "message", "role": "developer", "content": "Mind the list."}]
        history.append({"type": "message", "role": "user", "content": "And Oslo?"})
    assert goes_on(site)
    assert answer.json()["cache"]["line"]["outcome"] == "continued"
    assert answer.json()["cache"]["adapted"] == [
        {"rule": "billing_line_folded", "param": "instructions", "count": 1},
        {"rule": "system_in_place", "param": "messages", "count": 1},
    ]
