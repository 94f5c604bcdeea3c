"""``diagnostics``: which part of a request differs from that of an earlier message, and how many tokens that cost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from http_context import Site, served
from template_styles import STYLES, tokens_with

from scheduler.turn_receipt import Receipt
from server.api.anthropic.diagnostics import MOST_REQUESTS, DiagnosticsTable, RequestDigest

USER = {"role": "user", "content": "How is Rome?"}
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("time", "weather")]
EMPTY = RequestDigest(b"", b"", b"", b"", b"")


def asking(previous: str | None = None, **body: Any) -> dict[str, Any]:
    base = {"max_tokens": 50, "system": "Be brief. " * 9, "messages": [USER], "tools": TOOLS}
    return {**base, "diagnostics": {"previous_message_id": previous}, **body}


async def message(site: Site, previous: str | None = None, headers: Any = None, **body: Any) -> Any:
    answer = await site.http.post("/v1/messages", json=asking(previous, **body), headers=headers)
    assert answer.status_code == 200, answer.text
    from anthropic.types.beta import BetaMessage  # takes long, and every worker collects this file

    BetaMessage.model_validate(answer.json(), strict=True)
    return answer.json()


def appended(told: Any, text: str = "And Oslo?") -> list[Any]:
    """The history after a message, with another question."""
    return [USER, {"role": "assistant", "content": told["content"]}, {"role": "user", "content": text}]


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("system_changed", {"system": "Be long. " * 9}),
    ("tools_changed", {"tools": [*reversed(TOOLS)]}),
    ("tools_changed", {"tools": TOOLS[:1], "messages": [{"role": "user", "content": "Else?"}]}),
    ("messages_changed", {"messages": [{"role": "user", "content": "How is Oslo?"}]}),
    ("model_changed", {"model": "demo", "system": "Be long. " * 9}),
]


@pytest.mark.parametrize(("kind", "change"), CHANGES, ids=[f"{kind} {len(change)}" for kind, change in CHANGES])
@served()
async def test_the_first_part_that_differs_is_named_with_what_it_cost(
    site: Site, kind: str, change: dict[str, Any]
) -> None:
    first = await message(site)
    assert first["diagnostics"] is None
    second = await message(site, first["id"], **change)
    reason = second["diagnostics"]["cache_miss_reason"]
    assert reason["type"] == kind
    cache, usage = second["cache"], second["usage"]
    most = min(first["cache"]["prompt_tokens"], cache["prompt_tokens"] - 1)
    assert reason["cache_missed_input_tokens"] == most - usage["cache_read_input_tokens"] > 0


@served(tokens=lambda: tokens_with(STYLES["strict"]))
async def test_a_conversation_that_appends_has_nothing_to_tell(site: Site) -> None:
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "Be brief."}]
    first = await message(site, system=system)
    system[0]["text"] = "x-anthropic-billing-header: cch=2;"
    mark = {"cache_control": {"type": "ephemeral"}}
    history = appended(first)
    history[-1]["content"] = [{"type": "text", "text": "And Oslo?", **mark}]
    second = await message(site, first["id"], system=system, messages=history)
    assert second["diagnostics"] is None
    history[-1]["content"] = "And Oslo?"
    left = {"role": "system", "content": "900 tokens left"}
    third = await message(site, second["id"], system=system, messages=[*history, left])
    assert third["diagnostics"] is None
    system[0]["text"] = "x-anthropic-billing-header: cch=3;"
    fourth = await message(site, third["id"], system=system, messages=[{"role": "user", "content": "Else?"}])
    assert fourth["diagnostics"]["cache_miss_reason"]["type"] == "messages_changed"


@served()
async def test_a_change_that_cost_nothing_is_not_told(site: Site) -> None:
    first = await message(site)
    assert (await message(site, first["id"], model="demo"))["diagnostics"] is None


@served()
async def test_what_was_lost_here_is_no_change_of_the_client(site: Site) -> None:
    first = await message(site)
    site.engine.receipts = [Receipt(500, 0)] * 2
    second = await message(site, first["id"])
    assert second["diagnostics"] is None
    third = await message(site, second["id"], tool_choice={"type": "none"})
    assert third["diagnostics"] == {"cache_miss_reason": {"type": "unavailable"}}


@served({"ann": "key-a", "bob": "key-b"})
async def test_a_message_is_known_to_its_tenant_only(site: Site) -> None:
    ann, bob = {"x-api-key": "key-a"}, {"x-api-key": "key-b"}
    first = await message(site, headers=ann)
    assert (await message(site, first["id"], ann))["diagnostics"] is None
    for headers, previous in ((bob, first["id"]), (ann, "msg_none")):
        told = await message(site, previous, headers)
        assert told["diagnostics"] == {"cache_miss_reason": {"type": "previous_message_not_found"}}


@served()
async def test_a_stream_tells_it_when_it_starts(site: Site) -> None:
    first = await message(site)
    answer = await site.http.post("/v1/messages", json=asking(first["id"], system="Else. " * 9, stream=True))
    data = next(line for line in answer.text.split("\n") if line.startswith("data: "))
    told = json.loads(data.removeprefix("data: "))["message"]
    assert told["diagnostics"]["cache_miss_reason"]["type"] == "system_changed"
    again = await message(site, told["id"], system="Else. " * 9)
    assert again["diagnostics"] is None


@served()
async def test_who_does_not_ask_is_not_told(site: Site) -> None:
    body = {key: value for key, value in asking().items() if key != "diagnostics"}
    told = (await site.http.post("/v1/messages", json=body)).json()
    assert "diagnostics" not in told
    after = await message(site, told["id"])
    assert after["diagnostics"]["cache_miss_reason"]["type"] == "previous_message_not_found"


def test_the_newest_requests_of_a_tenant_are_remembered() -> None:
    table = DiagnosticsTable()
    for number in range(MOST_REQUESTS + 1):
        table.put("ann", f"msg_{number}", EMPTY)
    table.put("bob", "msg_0", EMPTY)
    assert table.get("ann", "msg_0") is None
    assert table.get("ann", "msg_1") is EMPTY
    assert table.get("ann", f"msg_{MOST_REQUESTS}") is EMPTY
    assert table.get("bob", "msg_0") is EMPTY
