"""Responses: where they go on, what they are asked, what is kept of them, and who may see it."""

from __future__ import annotations

import asyncio
import base64
import zlib
from typing import Any

import pytest
from http_context import Site, served, until
from openai_document import faults

from server.api.responses.input_items import MAX_REFERRED
from server.api.responses.schemas import ResponseRequest
from server.api.responses.sealed_reasoning import SEAL, seal, unseal
from server.log.timeline import SessionMoved
from server.schemas.item_texts import InputText
from server.schemas.items import MessageItem

UNKNOWN = ("resp_chain-0_0", "resp_1", "resp__", "x", "conv_1", "resp_a/b", "resp_" + "a" * 200)


async def respond(site: Site, input: Any = "Hello", headers: Any = None, **body: Any) -> Any:
    """A response; it is what the document says it is."""
    answer = await site.http.post("/v1/responses", json={"input": input, **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    made = answer.json()
    assert not faults("Response", made)
    return made


async def refused(site: Site, status: int, param: str | None, headers: Any = None, **body: Any) -> Any:
    answer = await site.http.post("/v1/responses", json=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert not faults("ErrorResponse", answer.json())
    error = answer.json()["error"]
    assert error["param"] == param, error
    return error


def session_of(response: Any) -> str:
    return str(response["id"].removeprefix("resp_").rpartition("_")[0])


# --- the object ---------------------------------------------------------------------------------------------


@served()
async def test_what_was_asked_is_told(site: Site) -> None:
    asked = {
        "model": "demo",
        "instructions": "Be kind.",
        "metadata": {"a": "b"},
        "max_output_tokens": 50,
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "reasoning": {"effort": "low", "summary": "auto"},
        "safety_identifier": "s",
        "temperature": 0.5,
        "text": {"format": {"type": "json_object"}, "verbosity": "medium"},
        "tools": [
            {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}
        ],
        "tool_choice": {"type": "function", "name": "f"},
        "top_p": 0.9,
        "truncation": "auto",
        "user": "u",
        "top_logprobs": 1,
    }
    made = await respond(site, **asked)
    told = {**made, "reasoning": {"effort": "low", "summary": "auto"}}
    assert {name: told[name] for name in asked} == asked
    assert (made["service_tier"], made["store"], made["background"]) == ("default", True, False)
    assert made["cache"]["prompt_tokens"] == made["usage"]["input_tokens"]
    assert (await site.http.get(f"/v1/responses/{made['id']}")).json() == made


@served()
async def test_a_salt_is_for_what_is_not_stored(site: Site) -> None:
    conversation = (await site.http.post("/v1/conversations", json={})).json()["id"]
    await refused(site, 400, "cache_salt", input="x", cache_salt="y")
    await refused(site, 400, "cache_salt", input="x", cache_salt="y", store=False, conversation=conversation)
    await respond(site, store=False, cache_salt="y")
    (asked,) = site.engine.submitted
    assert asked.salt
    assert asked.session is None


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("input", {}),
        ("input", {"input": 5}),
        ("input", {"input": []}),
        ("input", {"input": [{"role": "assistant", "content": "a"}]}),
        ("input[0].role", {"input": [{"role": "critic", "content": "a"}]}),
        ("input[0].content", {"input": [{"role": "user"}]}),
        ("input[0].content[0].type", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("input[0].content[0].text", {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}),
        ("input[0].type", {"input": [{"type": "telepathy", "id": "a"}]}),
        ("input[0].call_id", {"input": [{"type": "function_call_output", "call_id": "c", "output": "o"}]}),
        (
            "input[1].call_id",
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * 2},
        ),
        ("input[0].name", {"input": [{"type": "function_call", "call_id": "c", "name": "f f", "arguments": "{}"}]}),
        ("input[0].encrypted_content", {"input": [{"type": "reasoning", "encrypted_content": "wt1:AAAA"}]}),
        ("previous_response_id", {"input": "a", "previous_response_id": "resp_a_b", "conversation": "conv_a"}),
        ("conversation.id", {"input": "a", "conversation": {}}),
        ("tools[0].type", {"input": "a", "tools": [{"type": "telepathy"}]}),
        ("tool_choice.type", {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search_preview"}}),
        ("tools[0].name", {"input": "a", "tools": [{"type": "function"}]}),
        ("tools", {"input": "a", "tools": [{"type": "function", "name": "f"}] * 2}),
        (
            "tools[0].parameters",
            {"tools": [{"type": "function", "name": "f", "strict": True, "parameters": {"$ref": "#"}}]},
        ),
        ("tool_choice", {"input": "a", "tool_choice": "any"}),
        ("tool_choice", {"input": "a", "tool_choice": "required"}),
        ("tool_choice.name", {"input": "a", "tool_choice": {"type": "function", "name": "f"}}),
        ("text.format.type", {"input": "a", "text": {"format": {"type": "xml"}}}),
        ("text.format.name", {"input": "a", "text": {"format": {"type": "json_schema", "schema": {}}}}),
        ("text.format.schema", {"input": "a", "text": {"format": {"type": "json_schema", "name": "n"}}}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"$ref": "#"}}}}),
        ("text.format.name", {"input": "a", "text": {"format": {"type": "text", "name": "n"}}}),
        ("reasoning.effort", {"input": "a", "reasoning": {"effort": "huge"}}),
        ("reasoning.summary", {"input": "a", "reasoning": {"summary": "short"}}),
        ("include[0]", {"input": "a", "include": ["everything"]}),
        ("metadata", {"input": "a", "metadata": {str(i): "" for i in range(17)}}),
        ("background", {"input": "a", "background": True, "store": False}),
        ("stream_options", {"input": "a", "stream_options": {"include_obfuscation": True}}),
        ("service_tier", {"input": "a", "service_tier": 5}),
        ("truncation", {"input": "a", "truncation": "some"}),
        ("max_output_tokens", {"input": "a", "max_output_tokens": 0}),
        ("top_logprobs", {"input": "a", "top_logprobs": 21}),
        ("prompt", {"input": "a", "prompt": {"id": "p"}}),
        ("moderation", {"input": "a", "moderation": {"model": "m"}}),
        ("context_management[0].type", {"input": "a", "context_management": [{"type": "clearing"}]}),
        ("n", {"input": "a", "n": 2}),
        ("session_id", {"input": "a", "session_id": "s"}),
        ("model", {"input": "a", "model": "gpt-9"}),
    ],
)
@served()
async def test_what_cannot_be_is_refused_by_its_name(site: Site, param: str, body: dict[str, Any]) -> None:
    body = {"background": True, **body}
    if "input" not in body and param != "input":
        body = {"input": "a", **body}
    await refused(site, 404 if param == "model" else 400, param, **body)
    assert site.engine.submitted == []
    assert (await site.http.get("/v1/sessions")).json()["data"] == []
    await respond(site)


@served()
async def test_every_kind_of_item_is_read(site: Site) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "A"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "B", "annotations": [], "logprobs": []}],
        },
        {"role": "user", "content": "C"},
    ]
    made = await respond(site, items)
    record = await site.log.get("default", session_of(made))
    assert record is not None
    said = [(m.role, m.content, len(m.tool_calls)) for m in record.messages]
    assert said == [
        ("developer", "Be brief.", 0),
        ("user", "A", 0),
        ("assistant", "", 2),
        ("tool", "one", 0),
        ("tool", "two", 0),
        ("assistant", "B", 0),
        ("user", "C", 0),
        ("assistant", "Hello there, friend.", 0),
    ]
    assert record.messages[2].reasoning_content == "Hm"
    listed = (await site.http.get(f"/v1/responses/{made['id']}/input_items?order=asc")).json()
    assert not faults("ResponseItemList", listed)
    assert [item["type"] for item in listed["data"]] == [item.get("type", "message") for item in items]
    assert len({item["id"] for item in listed["data"]}) == len(items)


@served()
async def test_a_call_is_answered_once(site: Site) -> None:
    output = {"type": "function_call_output", "call_id": "c1", "output": "one"}
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    made = await respond(site, [{"role": "user", "content": "A"}, call, output])
    await refused(site, 400, "input[0].call_id", input=[output], previous_response_id=made["id"])
    await refused(site, 400, "input[0].call_id", input=[call], previous_response_id=made["id"])


@served()
async def test_sealed_reasoning_comes_back_in_the_clear(site: Site) -> None:
    assert unseal(seal("Hm, ünder")) == "Hm, ünder"
    given = {"type": "reasoning", "summary": [], "encrypted_content": seal("Hm")}
    made = await respond(site, [given, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}])
    record = await site.log.get("default", session_of(made))
    assert record is not None
    assert record.messages[0].reasoning_content == "Hm"


@served()
async def test_sealed_reasoning_cannot_grow_without_bound(site: Site) -> None:
    again = "Wait. " * 10_000
    assert unseal(seal(again)) == again
    bomb = SEAL + base64.b64encode(zlib.compress(b"a" * 1_000_000, 9)).decode()
    given = {"type": "reasoning", "summary": [], "encrypted_content": bomb}
    await refused(site, 400, "input[0].encrypted_content", input=[given, {"role": "user", "content": "y"}])


# --- where it goes on -----------------------------------------------------------------------------------------


@served()
async def test_a_follow_up_goes_on_and_an_older_one_branches(site: Site) -> None:
    one = await respond(site, "First.")
    two = await respond(site, "Second.", previous_response_id=one["id"])
    assert session_of(two) == session_of(one)
    branch = await respond(site, "Other.", previous_response_id=one["id"])
    assert session_of(branch) != session_of(one)
    assert "First." in site.prompts()[2]
    assert "Second." not in site.prompts()[2]
    assert branch["usage"]["input_tokens_details"]["cached_tokens"] >= one["usage"]["total_tokens"] - 1
    onward = await respond(site, "Then.", previous_response_id=branch["id"])
    assert session_of(onward) == session_of(branch)
    assert "Other." in site.prompts()[3]
    summary = await site.log.summary("default", session_of(branch))
    assert summary is not None
    assert summary.parent == (session_of(one), 1)
    assert summary.ttl == 30 * 86_400


TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("other", [{"instructions": "Be brief."}, {"tools": [TOOL]}])
@pytest.mark.parametrize("background", [False, True])
@served()
async def test_what_writes_the_past_anew_leaves_it_to_others(
    site: Site, background: bool, other: dict[str, Any]
) -> None:
    one = await respond(site, "First.")
    key = {"Idempotency-Key": "k"}
    body = {"previous_response_id": one["id"], "background": background, **other}
    two = await respond(site, "Second.", headers=key, **body)
    assert session_of(two) != session_of(one)
    while two["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0.01)
        two = (await site.http.get(f"/v1/responses/{two['id']}")).json()
    assert await respond(site, "Second.", headers=key, **body) == two
    for item in (two["output"][0], (await site.http.get(f"/v1/responses/{two['id']}/input_items")).json()["data"][0]):
        await respond(site, [{"type": "item_reference", "id": item["id"]}, {"role": "user", "content": "So?"}])
    three = await respond(site, "Third.", previous_response_id=one["id"])
    assert session_of(three) == session_of(one)
    assert "Second." not in site.prompts()[-1]


@served()
async def test_two_at_once_behind_one_response_both_go_on(site: Site) -> None:
    one = await respond(site, "First.")
    site.engine.pause_after = 1
    both = [asyncio.create_task(respond(site, text, previous_response_id=one["id"])) for text in ("A.", "B.")]
    await until(lambda: len(site.engine.running) >= 2)
    site.engine.go.set()
    made = [await task for task in both]
    assert len({session_of(response) for response in made}) == 2
    assert session_of(one) in {session_of(response) for response in made}


@served()
async def test_two_at_once_on_one_conversation_are_one_and_a_409(site: Site) -> None:
    conversation = (await site.http.post("/v1/conversations", json={})).json()["id"]
    site.engine.pause_after = 1
    first = asyncio.create_task(respond(site, "A.", conversation=conversation))
    await until(lambda: site.engine.running)
    answer = await site.http.post("/v1/responses", json={"input": "B.", "conversation": {"id": conversation}})
    assert answer.status_code == 409
    counted = await site.http.post("/v1/responses/input_tokens", json={"input": "B.", "conversation": conversation})
    assert counted.json()["input_tokens"] > 0
    site.engine.go.set()
    assert (await first)["conversation"] == {"id": conversation}
    assert (await respond(site, "B.", conversation=conversation))["output"]


@served()
async def test_behind_a_response_of_a_conversation_is_another_session(site: Site) -> None:
    conversation = (await site.http.post("/v1/conversations", json={})).json()["id"]
    one = await respond(site, "First.", conversation=conversation)
    branch = await respond(site, "Second.", previous_response_id=one["id"])
    assert session_of(branch) != session_of(one)
    assert branch["conversation"] is None
    items = (await site.http.get(f"/v1/conversations/{conversation}/items")).json()["data"]
    assert "Second." not in str(items)


@served()
async def test_a_response_that_its_session_has_left_cannot_be_followed(site: Site) -> None:
    one = await respond(site, "First.")
    two = await respond(site, "Second.", previous_response_id=one["id"])
    await site.http.post(f"/v1/sessions/{session_of(one)}/rewind", json={"turn": 1})
    three = await respond(site, "Third.", previous_response_id=one["id"])
    assert session_of(three) == session_of(one)
    error = await refused(site, 400, "previous_response_id", input="x", previous_response_id=two["id"])
    assert error["code"] == "previous_response_unusable"


@served()
async def test_without_store_nothing_is_kept(site: Site) -> None:
    one = await respond(site, "First.", store=False)
    assert one["store"] is False
    assert (await site.http.get(f"/v1/responses/{one['id']}")).status_code == 404
    assert (await site.http.get("/v1/sessions")).json()["data"] == []
    kept = await respond(site, "First.")
    follow = await respond(site, "Second.", previous_response_id=kept["id"], store=False)
    assert "First." in site.prompts()[-1]
    assert len((await site.http.get("/v1/sessions")).json()["data"]) == 1
    await refused(site, 400, "previous_response_id", input="x", previous_response_id=follow["id"])
    conversation = (await site.http.post("/v1/conversations", json={})).json()["id"]
    await respond(site, "Third.", conversation=conversation, store=False)
    items = (await site.http.get(f"/v1/conversations/{conversation}/items")).json()["data"]
    assert len(items) == 2


# --- instructions and truncation ------------------------------------------------------------------------------


@served()
async def test_instructions_are_those_of_one_response(site: Site) -> None:
    one = await respond(site, "First.", instructions="Speak like a pirate.")
    two = await respond(site, "Second.", previous_response_id=one["id"], instructions="Speak like a pirate.")
    three = await respond(site, "Third.", previous_response_id=two["id"], instructions="Speak like a poet.")
    await respond(site, "Fourth.", previous_response_id=three["id"])
    first, second, third, fourth = site.prompts()
    assert second.startswith(first)
    assert ("pirate" in third, "poet" in third) == (False, True)
    assert ("pirate" in fourth, "poet" in fourth) == (False, False)
    assert all("Second." in prompt for prompt in (third, fourth))
    assert third.index("poet") < third.index("First.")
    assert two["usage"]["input_tokens_details"]["cached_tokens"] >= one["usage"]["total_tokens"] - 1
    assert three["cache"]["miss"]["reason"] == "edited_history"
    items = (await site.http.get(f"/v1/responses/{one['id']}/input_items")).json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["First."]


@served()
async def test_what_does_not_fit_is_refused_or_compacted(site: Site) -> None:
    word = "Tell me a story. "
    conversation = (await site.http.post("/v1/conversations", json={})).json()["id"]
    for text in ("Oldest. " + word * 60, "Older. " + word * 60, "Old. " + word * 60):
        await respond(site, text, conversation=conversation)
    body: dict[str, Any] = {"input": "New. " + word * 60, "conversation": conversation, "max_output_tokens": 600}
    error = await refused(site, 400, "input", **body)
    assert error["code"] == "context_length_exceeded"
    made = await respond(site, **body, truncation="auto", instructions="Be kind.")
    assert made["cache"]["compaction"]["reason"] == "context"
    asked, shown = site.prompts()[-2:]
    assert all(text in asked for text in ("Oldest.", "Older.", "Old."))
    assert "Old" not in shown
    assert shown.index("Be kind.") < shown.index(site.engine.reply) < shown.index("New.")
    items = (await site.http.get(f"/v1/conversations/{conversation}/items?order=asc")).json()["data"]
    assert items[0]["content"][0]["text"].startswith("Oldest.")
    assert [item["type"] for item in items] == ["message"] * 6 + ["compaction", "message", "message"]
    again = await respond(site, "Newest.", conversation=conversation, instructions="Be kind.", max_output_tokens=400)
    assert site.prompts()[-1].startswith(shown)
    assert again["usage"]["input_tokens_details"]["cached_tokens"] >= made["usage"]["total_tokens"] - 1
    await refused(site, 400, "instructions", input="x", instructions=word * 9000)
    huge = await site.http.post("/v1/responses", json={"input": word * 9000, "truncation": "auto"})
    assert huge.status_code == 400
    assert huge.json()["error"]["code"] == "context_length_exceeded"


@served()
async def test_input_tokens_are_those_of_the_response(site: Site) -> None:
    one = await respond(site, "First.")
    asked = {"input": "Second.", "previous_response_id": one["id"], "instructions": "Be kind."}
    counted = await site.http.post("/v1/responses/input_tokens", json=asked)
    assert counted.json()["object"] == "response.input_tokens"
    made = await respond(site, **asked)
    assert counted.json()["input_tokens"] == made["usage"]["input_tokens"]


# --- references, retries, strangers -----------------------------------------------------------------------------


@served()
async def test_an_item_that_is_somewhere_is_referred_to(site: Site) -> None:
    one = await respond(site, "My name is Bo.")
    given = (await site.http.get(f"/v1/responses/{one['id']}/input_items")).json()["data"][0]
    ids = [given["id"], one["output"][0]["id"]]
    made = await respond(
        site, [*({"type": "item_reference", "id": id} for id in ids), {"role": "user", "content": "So?"}]
    )
    assert "My name is Bo." in site.prompts()[-1]
    assert made["usage"]["input_tokens_details"]["cached_tokens"] >= one["usage"]["total_tokens"] - 1
    bare = await respond(site, [{"id": ids[0]}])
    assert bare["output"]
    for unknown in ("msg_1", f"{ids[0]}0", "msg_chain-0_0"):
        await refused(site, 404, "input[0].id", input=[{"type": "item_reference", "id": unknown}])


@served()
async def test_many_references_read_each_session_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    one = await respond(site, "My name is Bo.")
    id, read, get = one["output"][0]["id"], [], site.log.get

    async def counted(tenant: str, session: str) -> Any:
        read.append(session)
        return await get(tenant, session)

    monkeypatch.setattr(site.log, "get", counted)
    await respond(site, [{"id": id}] * 20 + [{"role": "user", "content": "So?"}], store=False)
    assert read == [session_of(one)]
    ids = [f"{id.rpartition('_')[0]}{number}_0" for number in range(MAX_REFERRED + 1)]
    monkeypatch.setattr(
        "server.api.responses.input_items.items_of",
        lambda messages, session: [(0, MessageItem(f"msg_{session}_0", "user", [InputText("x")]))],
    )
    where = f"input[{MAX_REFERRED}].id"
    await refused(site, 400, where, input=[{"type": "item_reference", "id": one} for one in ids])


@pytest.mark.parametrize("stream", [False, True])
@served()
async def test_an_idempotency_key_makes_one_response(site: Site, stream: bool) -> None:
    key = {"Idempotency-Key": "k1"}
    one = await respond(site, "First.", headers=key)
    again = await site.http.post("/v1/responses", json={"input": "First.", "stream": stream}, headers=key)
    assert again.headers["idempotent-replayed"] == "true"
    if stream:
        assert '"type":"response.completed"' in again.text
        assert one["id"] in again.text
        assert "[DONE]" not in again.text
    else:
        assert again.json() == one
    assert len(site.engine.submitted) == 1
    await refused(site, 422, "Idempotency-Key", headers=key, input="Other.")
    follow = {"input": "Second.", "previous_response_id": one["id"]}
    two = await respond(site, **follow, headers={"Idempotency-Key": "k2"})
    assert session_of(two) == session_of(one)
    assert await respond(site, **follow, headers={"Idempotency-Key": "k2"}) == two
    branch = await respond(site, **follow, headers={"Idempotency-Key": "k3"})
    assert session_of(branch) != session_of(one)
    assert await respond(site, **follow, headers={"Idempotency-Key": "k3"}) == branch
    assert len(site.engine.submitted) == 3
    await refused(site, 400, "Idempotency-Key", headers=key, input="First.", store=False)


@served()
async def test_a_retry_while_the_first_try_runs_is_a_409(site: Site) -> None:
    one = await respond(site, "First.")
    site.engine.pause_after = 1
    key = {"Idempotency-Key": "k1"}
    first = asyncio.create_task(respond(site, "A.", previous_response_id=one["id"], headers=key))
    await until(lambda: site.engine.running)
    body: Any = {"input": "A.", "previous_response_id": one["id"]}
    assert (await site.http.post("/v1/responses", json=body, headers=key)).status_code == 409
    site.engine.go.set()
    made = await first
    assert await respond(site, **body, headers=key) == made


@served({"ann": "key-a", "bob": "key-b"})
async def test_what_is_foreign_is_unknown(site: Site) -> None:
    ann, bob = ({"Authorization": f"Bearer key-{name}"} for name in "ab")
    made = await respond(site, "Hello", headers=ann)
    conversation = (await site.http.post("/v1/conversations", json={}, headers=ann)).json()["id"]
    item = made["output"][0]["id"]
    for id in (made["id"], *UNKNOWN):
        answers = [
            await site.http.request(method, f"/v1/responses/{id}{rest}", headers=bob)
            for method, rest in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel"))
        ]
        assert {answer.status_code for answer in answers} == {404}, id
    told = [
        await refused(site, 400, "previous_response_id", headers=bob, input="x", previous_response_id=id)
        for id in UNKNOWN[:5]
    ]
    told.append(
        await refused(site, 400, "previous_response_id", headers=bob, input="x", previous_response_id=made["id"])
    )
    assert all(error == told[0] for error in told)
    errors = [
        await refused(site, 404, "conversation", headers=bob, input="x", conversation=id)
        for id in (conversation, "conv_nobody", "x", "conv_" + session_of(made))
    ]
    assert all(error == errors[0] for error in errors)
    await refused(site, 404, "input[0].id", headers=bob, input=[{"type": "item_reference", "id": item}])
    for method, rest in (("GET", ""), ("POST", ""), ("DELETE", ""), ("GET", "/items"), ("GET", f"/items/{item}")):
        body: Any = {"metadata": {}} if method == "POST" else None
        answer = await site.http.request(method, f"/v1/conversations/{conversation}{rest}", headers=bob, json=body)
        assert answer.status_code == 404
    assert (await site.http.get(f"/v1/responses/{made['id']}", headers=ann)).status_code == 200


@served()
async def test_deleted_with_its_chain(site: Site) -> None:
    one = await respond(site, "First.")
    two = await respond(site, "Second.", previous_response_id=one["id"])
    assert (await site.http.delete(f"/v1/responses/{one['id']}")).json()["deleted"] is True
    assert (await site.http.get(f"/v1/responses/{one['id']}")).status_code == 404
    assert "First." in str(await site.log.get("default", session_of(one)))
    assert (await site.http.get(f"/v1/responses/{two['id']}")).status_code == 200
    await site.http.delete(f"/v1/responses/{two['id']}")
    assert await site.log.get("default", session_of(one)) is None
    assert ("default", session_of(one)) in site.engine.forgotten
    assert (await site.http.delete(f"/v1/responses/{two['id']}")).status_code == 404


@served()
async def test_one_that_is_being_followed_is_deleted_alone(site: Site) -> None:
    one = await respond(site)
    site.engine.pause_after = 2
    two = asyncio.create_task(respond(site, "And?", previous_response_id=one["id"]))
    await until(lambda: site.engine.running)
    assert (await site.http.delete(f"/v1/responses/{one['id']}")).status_code == 200
    site.engine.go.set()
    assert (await site.http.get(f"/v1/responses/{(await two)['id']}")).status_code == 200


@served()
async def test_a_page_of_input_items(site: Site) -> None:
    made = await respond(site, [{"role": "user", "content": str(number)} for number in range(5)])
    where = f"/v1/responses/{made['id']}/input_items"

    async def page(**query: Any) -> Any:
        return (await site.http.get(where, params=query)).json()

    def texts(page: Any) -> str:
        return "".join(item["content"][0]["text"] for item in page["data"])

    assert texts(await page()) == "43210"
    first = await page(limit=2, order="asc", **{"include[]": "message.output_text.logprobs"})
    assert (texts(first), first["has_more"]) == ("01", True)
    rest = await page(after=first["last_id"], order="asc")
    assert (texts(rest), rest["has_more"]) == ("234", False)
    assert (await site.http.get(where, params={"after": "msg_x"})).status_code == 404
    assert (await site.http.get(where, params={"limit": 0})).json()["error"]["param"] == "limit"
    assert (await site.http.get(where, params={"include": "all"})).status_code == 400


@served()
async def test_another_server_that_was_faster_is_a_409(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    one = await respond(site, "First.")

    async def moved(*_: Any, **__: Any) -> None:
        raise SessionMoved

    monkeypatch.setattr(site.log, "commit", moved)
    answer = await site.http.post("/v1/responses", json={"input": "x", "previous_response_id": one["id"]})
    assert answer.status_code == 409


def test_the_schema_of_the_request_can_be_told() -> None:
    told = ResponseRequest.model_json_schema()
    assert {"input", "instructions", "previous_response_id", "conversation", "tools"} <= told["properties"].keys()


# --- the front of the prompt --------------------------------------------------------------------------------


@served()
async def test_a_billing_line_before_instructions_and_system_items_is_left_out(site: Site) -> None:
    line = "x-anthropic-billing-header: cch={n};\n"
    first = await respond(site, instructions=line.format(n=1) + "Be kind.")
    second = await respond(
        site,
        [{"role": "developer", "content": line.format(n=2) + "Be brief."}, {"role": "user", "content": "Again"}],
        instructions=line.format(n=2) + "Be kind.",
        previous_response_id=first["id"],
    )
    assert session_of(second) == session_of(first)
    assert second["cache"]["miss"] is None
    assert second["cache"]["adapted"] == [
        {"rule": "billing_line_folded", "param": "instructions", "count": 1},
        {"rule": "billing_line_folded", "param": "system", "count": 1},
    ]
    asked, again = site.prompts()
    assert "billing" not in again
    assert again.startswith(asked)
    assert "<|im_start|>system\nBe brief." in again
