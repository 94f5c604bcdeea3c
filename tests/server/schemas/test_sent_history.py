"""A history as clients send it: pictures that tools gave back are named in brackets, in a user message behind the
tool's too; calls without ids get them."""

from __future__ import annotations

from typing import Any

import pytest
from http_context import HELLO, Site, served

from server.schemas.sent_history import mend_history

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SEE = {"type": "text", "text": "See:"}
LOOK = {"type": "function", "function": {"name": "look"}}


def calls(*ids: str) -> dict[str, Any]:
    made = [{"id": id, "type": "function", "function": {"name": "look", "arguments": "{}"}} for id in ids]
    return {"role": "assistant", "content": None, "tool_calls": made}


def gave(id: str, text: str = "(see below)") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


@served()
async def test_pictures_behind_a_tools_result_are_the_tools(site: Site) -> None:
    history = [*HELLO, calls("c1", "c2"), gave("c1"), gave("c2"), user(PICTURE, SEE), user(PICTURE)]
    answer = await site.chat(messages=history, tools=[LOOK])
    assert answer.json()["cache"]["adapted"] == [{"rule": "image_replaced", "param": "user", "count": 2}]
    prompt = site.prompt()
    assert "[image]\nSee:" in prompt
    assert "AAAA" not in prompt


@pytest.mark.parametrize("before", [[], [calls("c1"), gave("c1"), {"role": "assistant", "content": "Seen."}]])
@served()
async def test_a_users_own_picture_is_refused_by_name(site: Site, before: list[Any]) -> None:
    answer = await site.chat(messages=[*HELLO, *before, user(PICTURE)])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"messages[{1 + len(before)}].content[0].image_url"


@served()
async def test_calls_without_ids_are_answered_in_their_order(site: Site) -> None:
    history = [*HELLO, calls("", "x", ""), gave("", "first"), gave("x", "second"), gave("", "third")]
    assert (await site.chat(messages=history, tools=[LOOK])).status_code == 200
    mended: Any = mend_history(history)
    assert [call["id"] for call in mended[1]["tool_calls"]] == ["call_1_0", "x", "call_1_2"]
    assert [message["tool_call_id"] for message in mended[2:]] == ["call_1_0", "x", "call_1_2"]
    again = await site.chat(messages=[*history, gave("", "fourth")], tools=[LOOK])
    assert again.json()["error"]["param"] == "messages[5].tool_call_id"


@pytest.mark.parametrize("value", [None, "x", [1], [{"role": "tool", "content": [3]}], [{"tool_calls": 1}]])
def test_what_is_no_history_is_left_to_the_schemas(value: Any) -> None:
    assert mend_history(value) == value
