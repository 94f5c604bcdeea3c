"""Conversations are compacted by the edit ``compact_20260112`` and by ``compaction``, and go on from their blocks."""

from __future__ import annotations

import base64
from typing import Any

import httpx2
import pytest
from compaction_kit import HEAD, LONG, SUMMARY, TALK, turn_of
from http_context import Call, Site, served, until

from server.chat.compaction import ASKED, GO_ON, TASK
from server.schemas.sealed_compaction import SEAL

CALLED = [
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {"a": "é"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "Seen."}]},
]
TOOLS = [{"name": "look", "input_schema": {"type": "object"}}]


def edit(**fields: Any) -> dict[str, Any]:
    trigger = {"type": "input_tokens", "value": 200}
    return {"edits": [{"type": "compact_20260112", "trigger": trigger, **fields}]}


async def message(site: Site, messages: Any = TALK, status: int = 200, headers: Any = None, **body: Any) -> Any:
    asked = {"max_tokens": 9, "messages": messages, "context_management": edit(), **body}
    asked = {name: value for name, value in asked.items() if value is not None}
    answer = await site.http.post("/v1/messages", json=asked, headers=headers)
    assert answer.status_code == status, answer.text
    if status == 200:
        from anthropic.types.beta import BetaMessage  # takes long, and every worker collects this file

        BetaMessage.model_validate(answer.json())
    return answer.json()


@pytest.mark.wide
@served()
async def test_beyond_its_trigger_the_older_part_is_summarised(site: Site) -> None:
    told = await message(site, system="Be kind.")
    assert [block["type"] for block in told["content"]] == ["compaction", "text"]
    assert told["content"][0]["content"] == SUMMARY
    asked = site.prompt(0)
    assert asked.startswith(turn_of("system", "Be kind."))
    assert ("First" in asked, "Two." in asked, "Third" in asked) == (True, True, False)
    assert asked.endswith(f"{turn_of('user', TASK)}<|im_start|>assistant\n")
    front = turn_of("system", "Be kind.")
    assert site.prompt() == f"{front}{HEAD}{turn_of('user', 'Third')}<|im_start|>assistant\n"
    parts = told["usage"]["iterations"]
    assert [part["type"] for part in parts] == ["compaction", "message"]
    read = [part["input_tokens"] + part["cache_read_input_tokens"] for part in parts]
    assert read == [len(site.prompt_ids(0)), len(site.prompt_ids(1))]
    assert told["usage"]["input_tokens"] == parts[1]["input_tokens"]
    assert (told["stop_reason"], told["context_management"]) == ("end_turn", {"applied_edits": []})
    assert told["cache"]["compaction"]["messages"] == 4


@pytest.mark.parametrize("only_newest", [False, True])
@served()
async def test_the_next_request_goes_on_behind_the_summary(site: Site, only_newest: bool) -> None:
    one = await message(site)
    said = {"role": "assistant", "content": one["content"]}
    sent = [*([] if only_newest else TALK), said, {"role": "user", "content": "Fourth"}]
    two = await message(site, sent)
    assert "iterations" not in two["usage"]
    assert site.prompt_ids()[: len(site.prompt_ids(1))] == site.prompt_ids(1)
    assert two["usage"]["cache_read_input_tokens"] >= len(site.prompt_ids(1)) - 1
    assert site.prompt().endswith(f"{turn_of('assistant', SUMMARY)}{turn_of('user', 'Fourth')}<|im_start|>assistant\n")
    body = {"messages": sent}
    counted = (await site.http.post("/v1/messages/count_tokens", json=body)).json()
    assert counted["input_tokens"] == len(site.prompt_ids())


@served()
async def test_a_block_without_what_this_server_knows_is_a_summary(site: Site) -> None:
    for sealed in (None, "of another server"):
        block = {"type": "compaction", "content": "So far.", "encrypted_content": sealed}
        await message(
            site, [*TALK, {"role": "assistant", "content": [block, {"type": "text", "text": "On."}]}, TALK[4]]
        )
        told = [("user", ASKED), ("assistant", "So far."), ("user", GO_ON), ("assistant", "On."), ("user", "Third")]
        assert site.prompt() == "".join(turn_of(*one) for one in told) + "<|im_start|>assistant\n"


@served()
async def test_results_stay_with_their_calls(site: Site) -> None:
    told = await message(site, [*TALK, *CALLED], tools=TOOLS)
    assert "Third" in site.prompt(0)
    assert "Seen." not in site.prompt(0)
    after = site.prompt()
    assert after.index(SUMMARY) < after.index(GO_ON) < after.index("é") < after.index("Seen.")
    said = {"role": "assistant", "content": told["content"]}
    await message(site, [*TALK, *CALLED, said, TALK[4]], tools=TOOLS, context_management=None)
    assert site.prompt().startswith(after)


@served()
async def test_a_client_may_pause_behind_the_compaction(site: Site) -> None:
    told = await message(site, context_management=edit(pause_after_compaction=True, instructions="Be brief."))
    assert (told["stop_reason"], [block["type"] for block in told["content"]]) == ("compaction", ["compaction"])
    assert [part["type"] for part in told["usage"]["iterations"]] == ["compaction"]
    assert (told["usage"]["input_tokens"], told["usage"]["output_tokens"]) == (0, 0)
    assert len(site.engine.submitted) == 1
    assert site.prompt().endswith(f"{turn_of('user', 'Third')}{turn_of('user', 'Be brief.')}<|im_start|>assistant\n")
    said = {"role": "assistant", "content": told["content"]}
    for kept, asked in (([], GO_ON), ([TALK[4]], "Third")):
        two = await message(site, [said, *kept])
        assert two["stop_reason"] == "end_turn"
        assert site.prompt() == f"{HEAD}{turn_of('user', asked)}<|im_start|>assistant\n"
    await message(site, [*TALK, said], context_management=None)
    assert site.prompt() == f"{HEAD}{turn_of('user', GO_ON)}<|im_start|>assistant\n"


@served()
async def test_the_parameter_compacts_everything(site: Site) -> None:
    asked = {"type": "summarize", "instructions": " "}
    told = await message(site, TALK[:2], compaction=asked, context_management=None)
    assert (told["stop_reason"], told["content"][0]["content"]) == ("compaction", SUMMARY)
    assert site.prompt().endswith(f"{turn_of('user', TASK)}<|im_start|>assistant\n")
    assert len(site.engine.submitted) == 1


@pytest.mark.parametrize("pause", [False, True])
@served()
async def test_a_stream_begins_with_the_compaction(site: Site, pause: bool) -> None:
    import anthropic

    transport: Any = httpx2.ASGITransport(site.app)
    http = httpx2.AsyncClient(transport=transport)
    async with anthropic.AsyncAnthropic(api_key="none", base_url="http://warm", http_client=http) as client:
        stream = client.beta.messages.stream(
            model="demo",
            max_tokens=9,
            messages=TALK,  # type: ignore[arg-type]
            context_management=edit(pause_after_compaction=pause),  # type: ignore[arg-type]
            betas=["compact-2026-01-12"],
        )
        async with stream as opened:
            kinds = [event.type async for event in opened]
            whole = await opened.get_final_message()
    assert kinds.count("compaction") == 1
    assert [block.type for block in whole.content] == (["compaction"] if pause else ["compaction", "text"])
    (block, *_) = whole.content
    assert block.type == "compaction"
    assert block.content == SUMMARY
    assert (block.encrypted_content is None) == pause
    assert whole.stop_reason == ("compaction" if pause else "end_turn")
    assert whole.usage.iterations is not None
    assert len(whole.usage.iterations) == 2 - pause


@served()
async def test_below_the_trigger_nothing_changes(site: Site) -> None:
    for rule in (edit(trigger={"type": "input_tokens", "value": 2000}), {"edits": [{"type": "compact_20260112"}]}):
        told = await message(site, context_management=rule)
        assert [block["type"] for block in told["content"]] == ["text"]
    told = await message(site, [{"role": "user", "content": "Long. " + LONG * 3}])  # nothing to fold
    assert [block["type"] for block in told["content"]] == ["text"]
    assert len(site.engine.submitted) == 3


@served()
async def test_what_does_not_fit_is_compacted_in_parts(site: Site) -> None:
    talk = [{"role": role, "content": f"Number {n}. {LONG}"} for n in range(20) for role in ("user", "assistant")]
    told = await message(site, [*talk, TALK[4]], context_management={"edits": [{"type": "compact_20260112"}]})
    summaries = told["cache"]["compaction"]["summaries"]
    assert summaries == len(site.engine.submitted) - 1 > 1
    assert [part["type"] for part in told["usage"]["iterations"]] == ["compaction"] * summaries + ["message"]
    asked = [site.prompt(at) for at in range(summaries)]
    assert all(any(f"Number {number}." in one for one in asked) for number in range(20))
    body = {"max_tokens": 9, "messages": [*talk, TALK[4]]}
    assert (await site.http.post("/v1/messages", json=body)).status_code == 400


@served()
async def test_a_beginning_of_the_reply_stays(site: Site) -> None:
    await message(site, [*TALK, {"role": "assistant", "content": "Well"}])
    assert site.prompt() == f"{HEAD}{turn_of('user', 'Third')}<|im_start|>assistant\nWell"


@served()
async def test_a_session_by_its_header_is_kept_as_it_was(site: Site) -> None:
    headers = {"x-session-id": "s1", "x-session-create": "true"}
    await message(site, TALK[:3], headers=headers, context_management=None)
    told = await message(site, headers=headers)
    kept = told["cache"]["compaction"]["kept"]
    messages = (await site.http.get(f"/v1/sessions/{kept}/messages")).json()["data"]
    assert [one["role"] for one in messages] == ["user", "assistant", "user", "assistant"]
    messages = (await site.http.get("/v1/sessions/s1/messages")).json()["data"]
    assert [one["content"] for one in messages[:2]] == [ASKED, SUMMARY]


@served()
async def test_a_client_that_leaves_ends_the_summary(site: Site) -> None:
    site.engine.pause_after = 2
    body = {"max_tokens": 9, "messages": TALK, "context_management": edit()}
    call = Call.post(site.app, "/v1/messages", body)
    await until(lambda: site.engine.running)
    await call.leave()
    assert site.engine.cancelled == [site.engine.submitted[0].turn]


def sealed(text: str) -> dict[str, Any]:
    encoded = SEAL + base64.b64encode(text.encode()).decode()
    return {"type": "compaction", "content": "So far.", "encrypted_content": encoded}


def said(block: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": [block]}, TALK[4]]}


WHERE = "context_management.edits[0]."
NO_OBJECTS: list[Any] = [[], "summarize", 1, True]
NO_COUNTS: list[Any] = [-1, 1.5, "9", True, 2**31]


@pytest.mark.parametrize(
    ("where", "body"),
    [
        *((f"{WHERE}trigger", {"context_management": edit(trigger=bad)}) for bad in NO_OBJECTS),
        *(
            (f"{WHERE}trigger", {"context_management": edit(trigger={"type": kind, "value": 1})})
            for kind in ("tool_uses", "thinking_turns", None, 1)
        ),
        *(
            (f"{WHERE}trigger.value", {"context_management": edit(trigger={"type": "input_tokens", "value": bad})})
            for bad in NO_COUNTS
        ),
        (f"{WHERE}instructions", {"context_management": edit(instructions=[])}),
        (f"{WHERE}pause_after_compaction", {"context_management": edit(pause_after_compaction=1)}),
        (f"{WHERE}nonsense", {"context_management": edit(nonsense=1)}),
        (f"{WHERE}type", {"context_management": {"edits": [{"type": ["compact_20260112"]}]}}),
        *(("compaction", {"compaction": bad}) for bad in NO_OBJECTS),
        ("compaction.type", {"compaction": {"type": "shorten"}}),
        ("compaction.x", {"compaction": {"type": "summarize", "x": 1}}),
        (
            "messages",
            {
                "compaction": {"type": "summarize"},
                "messages": [said({"type": "compaction", "content": "a"})["messages"][0]],
            },
        ),
        ("messages[0].content[0].content", said({"type": "compaction", "content": ""})),
        ("messages[0].content[0].content", said({"type": "compaction", "content": 1})),
        ("messages[0].content[0].encrypted_content", said({**sealed(""), "encrypted_content": 1})),
        *(
            ("messages[0].content[0].encrypted_content", said(sealed(text)))
            for text in ("", "x", "[]", '{"messages":[1]}')
        ),
        ("messages", {**said({"type": "compaction", "content": "a"}), "session_id": "s1"}),
        ("context_management", {"session_id": "s1"}),
        ("compaction", {"session_id": "s1", "compaction": {"type": "summarize"}}),
    ],
)
@served()
async def test_bad_input_is_refused_by_name(site: Site, where: str, body: dict[str, Any]) -> None:
    error = (await message(site, **{"status": 400, **body}))["error"]
    assert error["message"].startswith(where), error
    assert site.engine.submitted == []


@served()
async def test_a_model_that_writes_no_summary_is_told(site: Site) -> None:
    site.engine.reply = ""
    error = (await message(site, status=400))["error"]
    assert error["message"].startswith("This conversation cannot be compacted")
