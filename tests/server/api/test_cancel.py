"""A turn that is stopped on purpose is a turn: what it said is committed, and its client is told how it ended."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from http_context import HELLO, Call, Site, events, served, until

from scheduler.protocol import pack_ids
from server.api.responses import background
from server.api.sessions import routes

CHAT = {"messages": HELLO, "session_id": "s", "stream": True}
PIECE = re.compile(r'"(?:content|text|delta)":"([^"]*)"')  # of what was said, in any API's stream
SAID = "Hello there"  # after three tokens, of "Hello there, friend."


async def begin(site: Site, path: str = "/v1/chat/completions", headers: Any = None, **body: Any) -> Call:
    """A stream that has told of three tokens and waits for more."""
    site.engine.pause_after = 3
    call = Call.post(site.app, path, body or CHAT, headers=headers)
    await call.until(lambda: "there" in "".join(PIECE.findall(call.body.decode())))
    return call


async def cancel(site: Site, session: str = "s") -> Any:
    answer = await site.http.post(f"/v1/sessions/{session}/cancel")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def turns(site: Site, session: str = "s") -> list[Any]:
    return list((await site.http.get(f"/v1/sessions/{session}/turns")).json()["data"])


@served()
async def test_what_was_said_is_committed_and_the_stream_has_an_end(site: Site) -> None:
    call = await begin(site)
    assert await cancel(site) == {"object": "session.cancelled", "id": "s", "cancelled": True}
    await call.finish()
    told = events(call.body.decode())
    assert told[-1] == "[DONE]"
    assert [choice["finish_reason"] for event in told[:-1] for choice in event["choices"]][-1] == "cancelled"
    (turn,) = await turns(site)
    assert (turn["finish_reason"], turn["completion_tokens"]) == ("cancelled", 3)
    messages = (await site.http.get("/v1/sessions/s/messages")).json()["data"]
    assert [(m["role"], m["content"], m["turn"]) for m in messages] == [("user", "Hello", 1), ("assistant", SAID, 1)]
    assert site.engine.cancelled == [site.engine.submitted[0].turn]


@served()
async def test_the_next_turn_goes_on_from_what_was_said(site: Site) -> None:
    call = await begin(site)
    await cancel(site)
    await call.finish()
    record = await site.log.get("default", "s")
    assert record is not None
    site.engine.pause_after = None
    await site.chat(session_id="s")
    assert record.tokens[:-3] == site.prompt_ids(0)
    assert site.engine.submitted[1].prompt.startswith(pack_ids(record.tokens))
    assert [turn["finish_reason"] for turn in await turns(site)] == ["cancelled", "stop"]


@served()
async def test_a_body_that_is_not_streamed(site: Site) -> None:
    site.engine.pause_after = 3
    waiting = asyncio.create_task(site.chat(session_id="s"))
    await until(lambda: site.engine.submitted)
    await asyncio.sleep(0.02)
    await cancel(site)
    answer = await waiting
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] == "cancelled"
    assert answer.json()["choices"][0]["message"]["content"] == SAID


@served()
async def test_a_connection_that_breaks_commits_nothing_and_a_retry_runs_whole(site: Site) -> None:
    key = {"idempotency-key": "k"}
    call = await begin(site, headers=key)
    await call.leave()
    assert (await site.http.get("/v1/sessions/s")).status_code == 404
    site.engine.pause_after = None
    again = await site.chat(session_id="s", stream=True, headers=key)
    assert "idempotent-replayed" not in again.headers
    assert [turn["finish_reason"] for turn in await turns(site)] == ["stop"]


@served()
async def test_a_retry_of_what_was_stopped_is_answered_as_it_ended(site: Site) -> None:
    key = {"idempotency-key": "k"}
    call = await begin(site, headers=key)
    await cancel(site)
    await call.finish()
    again = await site.chat(session_id="s", stream=True, headers=key)
    assert again.headers["idempotent-replayed"] == "true"
    chosen = [choice for event in events(again.text)[:-1] for choice in event["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in chosen) == SAID
    assert chosen[-1]["finish_reason"] == "cancelled"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("admitted", [False, True])
@served()
async def test_one_that_has_said_nothing_is_no_turn(site: Site, admitted: bool, stream: bool) -> None:
    site.engine.pause_after = 0
    if not admitted:
        site.engine.admit.clear()
    waiting = asyncio.create_task(site.chat(session_id="s", stream=stream))
    await until(lambda: site.engine.submitted)
    await asyncio.sleep(0.02)
    assert (await cancel(site))["cancelled"]
    answer = await waiting
    if stream and admitted:
        assert events(answer.text)[-1]["error"]["code"] == "turn_cancelled"
    else:
        assert answer.status_code == 499
        assert answer.json()["error"]["code"] == "turn_cancelled"
    assert (await site.http.get("/v1/sessions/s")).status_code == 404


@served()
async def test_where_nothing_runs(site: Site) -> None:
    missing = await site.http.post("/v1/sessions/s/cancel")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "session_not_found")
    await site.chat(session_id="s")
    assert await cancel(site) == {"object": "session.cancelled", "id": "s", "cancelled": False}
    assert [turn["finish_reason"] for turn in await turns(site)] == ["stop"]
    assert site.engine.cancelled == []


@served({"ann": "a", "bob": "b"})
async def test_nobody_stops_the_turn_of_another_tenant(site: Site) -> None:
    ann, bob = ({"authorization": f"Bearer {key}"} for key in "ab")
    call = await begin(site, headers=ann)
    assert (await site.http.post("/v1/sessions/s/cancel", headers=bob)).status_code == 404
    assert site.engine.cancelled == []
    site.engine.go.set()
    await call.finish()
    assert b'"finish_reason":"stop"' in call.body


@served()
async def test_a_turn_that_is_about_to_begin_is_stopped_too_and_no_later_one(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "NUDGE_SECONDS", 0.005)
    ready = asyncio.Event()
    run = site.context.tokens.run

    async def slow(*work: Any) -> Any:
        await ready.wait()
        return await run(*work)

    monkeypatch.setattr(site.context.tokens, "run", slow)
    first = asyncio.create_task(site.chat(session_id="s"))
    await until(lambda: site.log.is_held("default", "s"))
    stopping = asyncio.create_task(cancel(site))
    await asyncio.sleep(0.02)
    site.engine.admit.clear()
    ready.set()
    assert (await first).status_code == 499
    site.engine.admit.set()
    assert (await site.chat(session_id="s")).status_code == 200
    assert (await stopping)["cancelled"]
    assert len(site.engine.cancelled) == 1


# -- in the words of the other endpoints ------------------------------------------------------------------------------


@served()
async def test_a_completion(site: Site) -> None:
    call = await begin(site, "/v1/completions", prompt="Once", session_id="s", stream=True, max_tokens=50)
    await cancel(site)
    await call.finish()
    ends = [c["finish_reason"] for event in events(call.body.decode())[:-1] for c in event["choices"]]
    assert ends[-1] == "cancelled"
    assert [turn["finish_reason"] for turn in await turns(site)] == ["cancelled"]


@served()
async def test_a_message_of_anthropics(site: Site) -> None:
    body = {"messages": HELLO, "session_id": "s", "stream": True, "max_tokens": 50}
    call = await begin(site, "/v1/messages", **body)
    await cancel(site)
    await call.finish()
    assert b'"stop_reason":"cancelled"' in call.body
    assert b"event: message_stop" in call.body


@pytest.mark.parametrize("detached", [False, True])
@served()
async def test_a_cancelled_response_is_a_turn_that_others_follow(site: Site, detached: bool) -> None:
    conversation = (await site.http.post("/v1/conversations", json={})).json()["id"]
    body = {"input": "Hello", "conversation": conversation, "stream": True, "background": detached}
    call = await begin(site, "/v1/responses", **body)
    id = call.body.partition(b'"id":"')[2].partition(b'"')[0].decode()
    session = conversation.removeprefix("conv_")
    if detached:
        assert (await site.http.post(f"/v1/responses/{id}/cancel")).json()["status"] == "cancelled"
    else:
        await cancel(site, session)
    await call.finish()
    kept = (await site.http.get(f"/v1/responses/{id}")).json()
    assert (kept["status"], kept["completed_at"], kept["incomplete_details"]) == ("cancelled", None, None)
    assert [(item["status"], item["content"][0]["text"]) for item in kept["output"]] == [("incomplete", SAID)]
    assert kept["usage"]["output_tokens"] == 3
    assert call.body.rpartition(b"event: ")[2].startswith(b"response.incomplete")
    assert [turn["finish_reason"] for turn in await turns(site, session)] == ["cancelled"]
    site.engine.pause_after = None
    record = await site.log.get("default", session)
    assert record is not None
    follow = await site.http.post("/v1/responses", json={"input": "And?", "previous_response_id": id})
    assert follow.status_code == 200
    assert site.engine.submitted[1].prompt.startswith(pack_ids(record.tokens))


@served()
async def test_a_response_that_hangs_is_ended_all_the_same(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "CANCEL_SECONDS", 0.02)
    monkeypatch.setattr(site.engine, "_cancel", lambda turn: None)  # an engine that does not answer
    call = await begin(site, "/v1/responses", input="Hello", stream=True, background=True)
    id = call.body.partition(b'"id":"')[2].partition(b'"')[0].decode()
    assert (await site.http.post(f"/v1/responses/{id}/cancel")).json()["status"] == "cancelled"
    await call.finish()
