"""What the stream of a response tells, event by event, and that it is what OpenAI's document says."""

from __future__ import annotations

import codecs
import dataclasses
import itertools
import json
from typing import Any

import pytest
from http_context import Site, demo_tokens, events, served
from openai_document import faults, stream_faults

from scheduler.protocol import FinishReason
from server.api.responses.client_tools import ToolNames
from server.api.responses.output import OutputItems
from server.chat.dialect_parser import ReasoningMarks
from server.chat.partial_reply import PartialReply
from server.chat.reply_parser import ArgumentsPiece, CallStart, ContentPiece, Part, ReasoningPiece
from server.schemas.item_texts import ItemLogprob, OutputText
from server.schemas.items import MessageItem, new_id

HEAD = ["response.created", "response.in_progress"]
MESSAGE = ["response.output_item.added", "response.content_part.added"]
TEXT = ["response.output_text.delta", "response.output_text.done", "response.content_part.done"]
THOUGHT = ["response.reasoning_text.delta", "response.reasoning_text.done", "response.content_part.done"]
CALL = ["response.output_item.added", "response.function_call_arguments.delta", "response.function_call_arguments.done"]
DONE = ["response.output_item.done"]
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"days": 2}}\n</tool_call>'


async def stream(site: Site, **body: Any) -> list[Any]:
    """The events of a response; they are numbered from 0, named as they are typed, and as the document says."""
    answer = await site.http.post("/v1/responses", json={"input": "Hello", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert not stream_faults("ResponseStreamEvent", answer.text, done=False)
    names = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    told = events("\n\n".join(block.partition("\n")[2] for block in answer.text.split("\n\n")))
    assert names == [event["type"] for event in told]
    assert [event["sequence_number"] for event in told] == [*range(len(told))]
    return told


def kinds(told: list[Any]) -> list[str]:
    """The types, those that follow each other and are the same once."""
    types = [event["type"] for event in told]
    return [kind for kind, before in zip(types, [None, *types], strict=False) if kind != before]


@pytest.fixture
def thinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The served model writes its reasoning between marks."""
    tokens = demo_tokens()
    dialect = dataclasses.replace(tokens.dialect, thought=ReasoningMarks("<think>", "</think>"))
    monkeypatch.setitem(tokens.__dict__, "dialect", dialect)


@pytest.mark.parametrize(
    ("reply", "tools", "middle", "output"),
    [
        ("Hello.", [], [*MESSAGE, *TEXT, *DONE], ["message"]),
        (
            "<think>Well.</think>Hello.",
            [],
            [*MESSAGE, *THOUGHT, *DONE, *MESSAGE, *TEXT, *DONE],
            ["reasoning", "message"],
        ),
        (CALLED, [WEATHER], [*CALL, *DONE], ["function_call"]),
        (f"{CALLED}\n{CALLED}", [WEATHER], [*CALL, *DONE, *CALL, *DONE], ["function_call"] * 2),
        (
            f"<think>Well.</think>Let me see.{CALLED}",
            [WEATHER],
            [*MESSAGE, *THOUGHT, *DONE, *MESSAGE, *TEXT, *DONE, *CALL, *DONE],
            ["reasoning", "message", "function_call"],
        ),
    ],
)
@pytest.mark.usefixtures("thinks")
@served()
async def test_every_event_in_its_order(
    site: Site, reply: str, tools: list[Any], middle: list[str], output: list[str]
) -> None:
    site.engine.reply = reply
    told = await stream(site, tools=tools)
    assert kinds(told) == [*HEAD, *middle, "response.completed"]
    final = told[-1]["response"]
    assert [item["type"] for item in final["output"]] == output
    assert [event["item"] for event in told if event["type"] == DONE[0]] == final["output"]
    assert (await site.http.get(f"/v1/responses/{final['id']}")).json() == final
    whole = (await site.http.post("/v1/responses", json={"input": "Hello", "tools": tools})).json()
    assert without_ids(whole["output"]) == without_ids(final["output"])
    for event in told:
        if event["type"].endswith(".delta"):
            item = final["output"][event["output_index"]]
            assert event["item_id"] == item["id"]
    for index, item in enumerate(final["output"]):
        deltas = [e["delta"] for e in told if e["type"].endswith(".delta") and e["output_index"] == index]
        assert "".join(deltas) == (item["arguments"] if "arguments" in item else item["content"][0]["text"])


def without_ids(items: list[Any]) -> list[Any]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


@served()
async def test_a_reply_that_is_cut_is_incomplete(site: Site) -> None:
    told = await stream(site, max_output_tokens=2)
    assert told[-1]["type"] == "response.incomplete"
    final = told[-1]["response"]
    assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert final["output"][0]["status"] == "incomplete"
    assert final["completed_at"] is None


@pytest.mark.parametrize("ends", [FinishReason.ERROR, RuntimeError("a secret")])
@served()
async def test_a_reply_that_fails_says_so_twice_and_is_nowhere(site: Site, ends: Any) -> None:
    site.engine.ends_badly = ends
    told = await stream(site)
    assert kinds(told)[-2:] == ["error", "response.failed"]
    failed = told[-1]["response"]
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == "server_error"
    assert "secret" not in json.dumps(told)
    assert (await site.http.get(f"/v1/responses/{failed['id']}")).status_code == 404
    assert (await site.http.get("/v1/sessions")).json()["data"] == []


@served()
async def test_a_commit_that_fails_leaves_no_gap_in_the_numbers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(site.log, "commit", full)
    told = await stream(site)
    assert kinds(told)[-2:] == ["error", "response.failed"]


@served()
async def test_an_empty_reply_is_an_empty_message(site: Site) -> None:
    site.engine.reply = ""
    told = await stream(site)
    assert told[-1]["response"]["output"][0]["content"][0]["text"] == ""


@served()
async def test_logprobs_are_those_of_the_text(site: Site) -> None:
    told = await stream(site, include=["message.output_text.logprobs"], top_logprobs=2)
    part = told[-1]["response"]["output"][0]["content"][0]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"] == "Hello there, friend."
    assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {2}
    streamed = [e for event in told if event["type"] == TEXT[0] for e in event["logprobs"]]
    assert streamed == part["logprobs"]


@pytest.mark.usefixtures("thinks")
@served()
async def test_logprobs_of_other_items_are_left_out(site: Site) -> None:
    site.engine.reply = f"<think> Well then. </think> Hello. {CALLED}"
    told = await stream(site, tools=[WEATHER], top_logprobs=1)
    item = next(item for item in told[-1]["response"]["output"] if item["type"] == "message")
    part = item["content"][0]
    assert part["text"] == "Hello."
    assert "".join(entry["token"] for entry in part["logprobs"]).strip() == "Hello."


@served()
async def test_obfuscation_hides_how_long_a_delta_is(site: Site) -> None:
    told = await stream(site, stream_options={"include_obfuscation": True})
    deltas = [event for event in told if event["type"] == TEXT[0]]
    assert {len(event["delta"] + event["obfuscation"]) % 32 for event in deltas} == {0}


def parts_of(*parts: Part) -> list[Any]:
    """The items that parts of a reply become."""
    numbers = iter(range(1000))
    output = OutputItems(lambda kind: new_id(kind, "s"), lambda: next(numbers), ToolNames())
    for part in parts:
        list(output.take([part], ()))
    list(output.finish("completed"))
    return output.items


def test_what_comes_again_is_another_item() -> None:
    items = parts_of(
        ContentPiece("a"),
        CallStart(0, "c1", "f"),
        ArgumentsPiece(0, "{}"),
        ContentPiece("b"),
        ReasoningPiece("r"),
        ContentPiece("c"),
    )
    assert [item.id.partition("_")[0] for item in items] == ["msg", "fc", "msg", "rs", "msg"]
    assert len({item.id for item in items}) == 5


def test_the_document_is_asked_at_all() -> None:
    assert faults("ResponseStreamEvent", {"type": "response.created", "sequence_number": "0"})
    assert PartialReply().content == ""


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
def test_no_token_is_lost_however_a_reply_comes(size: int) -> None:
    """Half a character and one that follows it are one U+FFFD; each of their tokens keeps its log-probability."""
    numbers = itertools.count()
    output = OutputItems(lambda kind: kind, lambda: next(numbers), ToolNames([]))
    data = [0xDE, 0x19, ord("M"), 0xEF, 0xBF, ord("0")]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for first in range(0, len(data), size):
        group = data[first : first + size]
        text = decoder.decode(bytes(group), first + size >= len(data))
        entries = [ItemLogprob(bytes([byte]).decode(errors="replace"), [byte], -1.0, []) for byte in group]
        for _ in output.take([ContentPiece(text)] if text else [], entries):
            pass
    [message] = output.snapshot()
    assert isinstance(message, MessageItem)
    [content] = message.content
    assert isinstance(content, OutputText)
    assert [entry.bytes for entry in content.logprobs] == [[byte] for byte in data]
