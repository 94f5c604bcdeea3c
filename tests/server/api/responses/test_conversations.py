"""Conversations: made, changed, listed item by item, edited, and answered."""

from __future__ import annotations

from typing import Any

import pytest
from http_context import Site, demo_tokens, served
from openai_document import faults

BO = {"type": "message", "role": "user", "content": "My name is Bo."}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "42"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]}
REPLY = {"role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]}


async def create(site: Site, **body: Any) -> str:
    answer = await site.http.post("/v1/conversations", json=body)
    assert answer.status_code == 200, answer.text
    assert not faults("ConversationResource", answer.json())
    return str(answer.json()["id"])


async def items(site: Site, conversation: str, **query: Any) -> list[Any]:
    answer = await site.http.get(f"/v1/conversations/{conversation}/items", params={"order": "asc", **query})
    assert not faults("ConversationItemList", answer.json())
    return list(answer.json()["data"])


def shown(items: list[Any]) -> list[str]:
    return [item.get("arguments") or item.get("output") or item["content"][0]["text"] for item in items]


async def respond(site: Site, conversation: str, input: Any, **body: Any) -> Any:
    answer = await site.http.post("/v1/responses", json={"input": input, "conversation": conversation, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


@served()
async def test_from_its_creation_to_its_end(site: Site) -> None:
    id = await create(site, items=[BO], metadata={"a": "b"})
    got = (await site.http.get(f"/v1/conversations/{id}")).json()
    assert (got["id"], got["object"], got["metadata"]) == (id, "conversation", {"a": "b"})
    changed = (await site.http.post(f"/v1/conversations/{id}", json={"metadata": {"c": "d"}})).json()
    assert changed == {**got, "metadata": {"c": "d"}}
    assert (await site.http.post(f"/v1/conversations/{id}", json={"metadata": None})).json()["metadata"] == {}
    made = await respond(site, id, "Hello")
    gone = (await site.http.delete(f"/v1/conversations/{id}")).json()
    assert gone == {"object": "conversation.deleted", "id": id, "deleted": True}
    assert not faults("DeletedConversationResource", gone)
    for where in (f"/v1/conversations/{id}", f"/v1/conversations/{id}/items", f"/v1/responses/{made['id']}"):
        assert (await site.http.get(where)).status_code == 404
    assert (await site.http.delete(f"/v1/conversations/{id}")).status_code == 404


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("items", {"items": [BO] * 21}),
        ("items[0].type", {"items": [{"type": "telepathy"}]}),
        ("items[0].call_id", {"items": [OUTPUT]}),
        ("metadata", {"metadata": {"a": 1}}),
        ("name", {"name": "x"}),
    ],
)
@served()
async def test_what_cannot_be_is_refused(site: Site, param: str, body: Any) -> None:
    answer = await site.http.post("/v1/conversations", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not faults("ErrorResponse", answer.json())


@served()
async def test_items_keep_their_ids(site: Site) -> None:
    id = await create(site, items=[BO])
    added = await site.http.post(f"/v1/conversations/{id}/items", json={"items": [THOUGHT, REPLY, CALL, OUTPUT]})
    assert added.status_code == 200, added.text
    assert not faults("ConversationItemList", added.json())
    made = await respond(site, id, [{"role": "user", "content": "And?"}], instructions="Be kind.")
    listed = await items(site, id)
    assert shown(listed) == ["My name is Bo.", "Hm", "Hi.", "{}", "42", "And?", "Hello there, friend."]
    assert listed[1:5] == added.json()["data"]
    assert listed[6] == made["output"][0]
    assert listed[5]["id"] == (await site.http.get(f"/v1/responses/{made['id']}/input_items")).json()["data"][0]["id"]
    for item in listed:
        got = (await site.http.get(f"/v1/conversations/{id}/items/{item['id']}")).json()
        assert got == item
        assert not faults("ConversationItem", got)
    assert shown(await items(site, id, limit=2, after=listed[1]["id"])) == ["Hi.", "{}"]
    assert shown(await items(site, id, order="desc", limit=1)) == ["Hello there, friend."]
    for number in (None, "msg_x", "msg_a_b"):
        assert (await site.http.get(f"/v1/conversations/{id}/items/{number}")).status_code == 404


@served()
async def test_an_item_that_is_taken_out_leaves_the_rest(site: Site) -> None:
    id = await create(site)
    for text in ("First.", "Second.", "Third."):
        await respond(site, id, text)
    before = await items(site, id)
    first = site.prompt_ids()
    gone = await site.http.delete(f"/v1/conversations/{id}/items/{before[2]['id']}")
    assert not faults("ConversationResource", gone.json())
    assert await items(site, id) == [*before[:2], *before[3:]]
    assert (await site.http.delete(f"/v1/conversations/{id}/items/{before[2]['id']}")).status_code == 404
    made = await respond(site, id, "Fourth.")
    text = site.prompt()
    assert "Second." not in text
    assert text.index("First.") < text.index("Third.") < text.index("Fourth.")
    assert text.count("Hello there, friend.") == 3
    end = len(demo_tokens().encode(demo_tokens().decode(first).partition("Second.")[0], special=False)) - 3
    assert made["usage"]["input_tokens_details"]["cached_tokens"] >= end
    assert [item["id"] for item in await items(site, id)][:5] == [item["id"] for item in (*before[:2], *before[3:])]


@pytest.mark.parametrize(("which", "left"), [(0, ["Hi.", "{}"]), (1, ["Hm", "{}"]), (2, ["Hm", "Hi."])])
@served()
async def test_a_part_of_a_reply_is_taken_out(site: Site, which: int, left: list[str]) -> None:
    id = await create(site, items=[THOUGHT, REPLY, CALL, BO])
    listed = await items(site, id)
    await site.http.delete(f"/v1/conversations/{id}/items/{listed[which]['id']}")
    assert shown(await items(site, id)) == [*left, "My name is Bo."]
    record = await site.log.get("default", id.removeprefix("conv_"))
    assert record is not None
    message = record.messages[0]
    assert (bool(message.reasoning_content), bool(message.content), bool(message.tool_calls)) == tuple(
        text in left for text in ("Hm", "Hi.", "{}")
    )


@served()
async def test_any_session_is_a_conversation_too(site: Site) -> None:
    await site.chat("/v1/sessions/ann/chat/completions")
    await site.chat("/v1/sessions/ann/chat/completions")
    listed = await items(site, "conv_ann")
    assert shown(listed) == ["Hello", "Hello there, friend."] * 2
    assert len({item["id"] for item in listed}) == 4
    await site.http.delete(f"/v1/conversations/conv_ann/items/{listed[0]['id']}")
    assert await items(site, "conv_ann") == listed[1:]
    made = await respond(site, "conv_ann", "And?")
    assert made["id"].startswith("resp_ann_")
    messages = (await site.http.get("/v1/sessions/ann/messages")).json()["data"]
    assert [message["content"] for message in messages][-2:] == ["And?", "Hello there, friend."]
    assert "items" not in messages[-1]


@served()
async def test_what_is_asked_may_be_there_already(site: Site) -> None:
    id = await create(site, items=[BO])
    made = await site.http.post("/v1/responses", json={"conversation": id})
    assert made.status_code == 200, made.text
    again = await site.http.post("/v1/responses", json={"conversation": id})
    assert again.status_code == 400
    assert again.json()["error"]["param"] == "input"


@served()
async def test_it_travels_in_a_capsule(site: Site) -> None:
    id = await create(site, items=[THOUGHT, REPLY, BO])
    await respond(site, id, "Hello", instructions="Be kind.")
    before = await items(site, id)
    name = id.removeprefix("conv_")
    capsule = (await site.http.get(f"/v1/sessions/{name}/export")).content
    answer = await site.http.post(
        "/v1/sessions/import",
        params={"id": "new"},
        content=capsule,
        headers={"content-type": "application/zip"},
    )
    assert answer.status_code in (200, 201), answer.text
    assert await items(site, "conv_new") == before
