"""Streams: what a client sees when the engine dies, when it is slow, and what happens when the client leaves."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from fake_engine import died
from http_context import HELLO, Call, Site, events, served, until

import server.http.sse
from scheduler.protocol import FinishReason
from server.engine.engine import TurnRefused
from server.errors import ClientLeft
from server.http.sse import EventStream, while_connected

CHAT = "/v1/chat/completions"


def body(**more: Any) -> dict[str, Any]:
    return {"messages": HELLO, **more}


@pytest.mark.parametrize(
    ("end", "kind", "code"),
    [
        (died(), "server_error", "engine_died"),
        (FinishReason.ERROR, "server_error", "engine_error"),
        (FinishReason.CANCELLED, "invalid_request_error", "session_deleted"),
    ],
)
@served()
async def test_a_stream_that_fails_ends_with_one_error_event(site: Site, end: Any, kind: str, code: str) -> None:
    site.engine.ends_badly = end
    response = await site.chat(stream=True)
    assert response.status_code == 200
    told = events(response.text)
    assert "[DONE]" not in told
    assert [set(event) == {"error"} for event in told] == [False] * (len(told) - 1) + [True]
    error = told[-1]["error"]
    assert (set(error), error["type"]) == ({"message", "type", "param", "code"}, kind)
    assert error["code"] == code
    assert "secret" not in response.text
    assert all(choice["finish_reason"] is None for event in told[:-1] for choice in event["choices"])


@served()
async def test_a_failed_choice_ends_the_stream_and_the_other_turns(site: Site) -> None:
    site.engine.badly_after = 1
    site.engine.ends_badly = TurnRefused("queue_full", "Full.")
    response = await site.chat(stream=True, n=3)
    assert response.status_code == 200
    assert events(response.text)[-1]["error"]["code"] == "queue_full"
    assert site.engine.running == set()


@served()
async def test_the_status_waits_for_admission(site: Site) -> None:
    site.engine.admit.clear()
    call = Call.post(site.app, CHAT, body(stream=True))
    await until(lambda: site.engine.submitted)
    await asyncio.sleep(0.02)
    assert call.status == 0
    site.engine.admit.set()
    await call.finish()
    assert (call.status, call.body.endswith(b"data: [DONE]\n\n")) == (200, True)


@served()
async def test_chunks_leave_as_they_come(site: Site) -> None:
    site.engine.pause_after = 1
    call = Call.post(site.app, CHAT, body(stream=True))
    await call.until(lambda: b'"Hello"' in call.body)
    assert b"friend" not in call.body
    site.engine.go.set()
    await call.finish()
    assert call.done
    assert b"friend" in call.body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 4])
@served()
async def test_a_client_that_leaves_takes_all_its_turns_along(site: Site, stream: bool, n: int) -> None:
    site.engine.pause_after = 1
    call = Call.post(site.app, CHAT, body(stream=stream, n=n))
    if stream:
        await call.until(lambda: b'"Hello"' in call.body)
    else:
        await until(lambda: len(site.engine.submitted) >= n)
    await call.leave()
    assert sorted(site.engine.cancelled) == sorted(s.turn for s in site.engine.submitted)
    assert len(site.engine.submitted) == n
    assert not call.done or not stream


@pytest.mark.parametrize("stream", [False, True])
@served()
async def test_a_client_that_leaves_the_queue_is_cancelled_too(site: Site, stream: bool) -> None:
    site.engine.admit.clear()
    call = Call.post(site.app, CHAT, body(stream=stream))
    await until(lambda: site.engine.submitted)
    await call.leave()
    assert site.engine.cancelled == [site.engine.submitted[0].turn]


@served()
async def test_finished_turns_are_not_cancelled(site: Site) -> None:
    await site.chat()
    await site.chat(stream=True)
    assert site.engine.cancelled == []


@served()
async def test_silence_is_filled_with_comments(site: Site) -> None:
    before, server.http.sse.PING_SECONDS = server.http.sse.PING_SECONDS, 0.01
    try:
        site.engine.pause_after = 1
        call = Call.post(site.app, CHAT, body(stream=True))
        await call.until(lambda: call.body.count(b": ping\n\n") >= 2)
        site.engine.go.set()
        await call.finish()
    finally:
        server.http.sse.PING_SECONDS = before
    texts = [e["choices"][0]["delta"].get("content", "") for e in events(call.body.decode())[:-1]]
    assert "".join(texts) == "Hello there, friend."


async def numbers(upto: int) -> AsyncGenerator[bytes]:
    for number in range(upto):
        yield server.http.sse.frame_event(str(number).encode())
    raise ValueError("a secret")


async def test_an_unforeseen_exception_is_told_without_its_text() -> None:
    sent: list[Any] = []
    closed: list[bool] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    await EventStream(numbers(2), lambda: closed.append(True))({"type": "http"}, receive, send)
    data = b"".join(message.get("body", b"") for message in sent)
    assert data.startswith(b"data: 0\n\ndata: 1\n\ndata: ")
    assert json.loads(data.split(b"data: ")[-1])["error"]["type"] == "server_error"
    assert b"secret" not in data
    assert closed == [True]


@pytest.mark.parametrize("breaks_at", ["http.response.start", "http.response.body"])
async def test_a_connection_that_breaks_while_sending_closes_quietly(breaks_at: str) -> None:
    closed: list[bool] = []

    async def send(message: Any) -> None:
        if message["type"] == breaks_at:
            raise BrokenPipeError

    async def receive() -> Any:
        await asyncio.Event().wait()

    await EventStream(numbers(2), lambda: closed.append(True))({"type": "http"}, receive, send)
    assert closed == [True]


def test_work_is_cancelled_and_cleaned_up_when_the_client_leaves() -> None:
    cleaned: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    async def receive() -> Any:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    with pytest.raises(ClientLeft):
        asyncio.run(while_connected(receive, work()))
    assert cleaned == [True]
