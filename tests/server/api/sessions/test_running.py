"""A turn in the background: it outlives its connection, others follow it, and it ends like any other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from http_context import HELLO, Call, Site, events, served

from scheduler.protocol import FinishReason
from server.engine.engine import TurnRefused

CHAT = {"messages": HELLO, "stream": True, "background": True}
PATH = "/v1/sessions/s/chat/completions"
SAID = "Hello there, friend."
KEYS = {"ann": "a-key-of-ann", "bob": "a-key-of-bob"}


def as_user(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


def words(text: str) -> str:
    """What a stream has said."""
    chunks = [event for event in events(text) if event != "[DONE]"]
    return "".join(choice["delta"].get("content") or "" for event in chunks for choice in event.get("choices", ()))


async def begin(site: Site, headers: Any = None) -> Call:
    """A turn in the background that has said three tokens and waits."""
    site.engine.pause_after = 3
    call = Call.post(site.app, PATH, CHAT, headers=headers)
    await call.until(lambda: "there" in words(call.body.decode()))
    return call


async def running(site: Site, headers: Any = None) -> Any:
    answer = await site.http.get("/v1/sessions/s/running", headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


async def turns(site: Site) -> list[Any]:
    """Those that are kept once nothing runs any more."""
    while await running(site):
        await asyncio.sleep(0.001)
    answer = await site.http.get("/v1/sessions/s/turns")
    return list(answer.json()["data"]) if answer.status_code == 200 else []


@served()
async def test_a_turn_goes_on_without_its_connection(site: Site) -> None:
    call = await begin(site)
    await call.leave()
    (told,) = await running(site)
    assert (told["object"], told["session_id"], told["first_message"]) == ("session.running_turn", "s", 0)
    assert [(said["index"], said["role"], said["content"]) for said in told["messages"]] == [(0, "user", "Hello")]
    assert (await site.chat(PATH)).json()["error"]["code"] == "session_busy"
    site.engine.go.set()
    (turn,) = await turns(site)
    assert (turn["finish_reason"], turn["reply_preview"]) == ("stop", SAID)
    assert (await site.chat(PATH)).status_code == 200


@served()
async def test_whoever_follows_it_gets_all_of_it(site: Site) -> None:
    call = await begin(site)
    other = asyncio.create_task(site.http.get("/v1/sessions/s/running?stream=true"))
    await asyncio.sleep(0.02)
    site.engine.go.set()
    await call.finish()
    followed = await other
    assert followed.headers["content-type"].startswith("text/event-stream")
    assert followed.content == call.body
    assert (words(followed.text), events(followed.text)[-1]) == (SAID, "[DONE]")


@served()
async def test_a_later_turn_tells_only_what_it_adds(site: Site) -> None:
    await site.chat(PATH)
    call = await begin(site)
    (told,) = await running(site)
    assert [told["first_message"], [said["index"] for said in told["messages"]]] == [2, [2]]
    site.engine.go.set()
    await call.finish()


@served()
async def test_cancel_keeps_what_was_said(site: Site) -> None:
    call = await begin(site)
    await call.leave()
    assert (await site.http.post("/v1/sessions/s/cancel")).json()["cancelled"] is True
    (turn,) = await turns(site)
    assert (turn["finish_reason"], turn["reply_preview"]) == ("cancelled", "Hello there")


@served()
async def test_a_deletion_ends_it(site: Site) -> None:
    await site.chat(PATH)
    call = await begin(site)
    other = asyncio.create_task(site.http.get("/v1/sessions/s/running?stream=true"))
    await asyncio.sleep(0.02)
    assert (await site.http.delete("/v1/sessions/s")).status_code == 200
    await call.finish()
    assert events((await other).text)[-1]["error"]["code"] == "session_deleted"
    assert await turns(site) == []


@served()
async def test_a_retry_after_it_has_ended_is_a_replay(site: Site) -> None:
    key = {"idempotency-key": "k"}
    call = await begin(site, key)
    await call.leave()
    site.engine.go.set()
    assert len(await turns(site)) == 1
    again = await site.http.post(PATH, json={"messages": HELLO, "stream": True}, headers=key)
    assert (again.headers["idempotent-replayed"], words(again.text)) == ("true", SAID)


@served()
async def test_a_failure_in_the_middle_is_the_last_event(site: Site) -> None:
    site.engine.ends_badly = FinishReason.ERROR
    answer = await site.http.post(PATH, json=CHAT)
    assert answer.status_code == 200
    assert events(answer.text)[-1]["error"]["code"] == "engine_error"
    assert await turns(site) == []
    site.engine.ends_badly = None
    assert (await site.chat(PATH)).status_code == 200


@served()
async def test_a_turn_that_is_refused_is_refused_with_a_status(site: Site) -> None:
    site.engine.refusal = TurnRefused("queue_full", "The queue is full.", 1)
    answer = await site.http.post(PATH, json=CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert await running(site) == []


@served()
async def test_without_a_running_turn_there_is_nothing_to_follow(site: Site) -> None:
    assert await running(site) == []
    answer = await site.http.get("/v1/sessions/s/running?stream=true")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_running_turn")


@served(KEYS)
async def test_another_tenant_sees_nothing_of_it(site: Site) -> None:
    await begin(site, as_user("ann"))
    assert len(await running(site, as_user("ann"))) == 1
    assert await running(site, as_user("bob")) == []
    answer = await site.http.get("/v1/sessions/s/running?stream=true", headers=as_user("bob"))
    assert answer.status_code == 404
    site.engine.go.set()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", CHAT, "background"),
        (PATH, {**CHAT, "stream": False}, "background"),
        (PATH, {**CHAT, "background": "yes"}, "background"),
        ("/v1/sessions/s/regenerate", {"background": True}, "background"),
    ],
)
@served()
async def test_bad_input(site: Site, path: str, body: Any, param: str) -> None:
    answer = await site.http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("query", ["stream=maybe", "start=3"])
@served()
async def test_bad_queries(site: Site, query: str) -> None:
    answer = await site.http.get(f"/v1/sessions/s/running?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


@served()
async def test_a_shutdown_ends_it_and_commits_nothing(site: Site) -> None:
    call = await begin(site)
    await site.context.running.close()
    await call.leave()
    assert await turns(site) == []
