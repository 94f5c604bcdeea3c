"""Responses in the background: queued, followed, resumed, cancelled, failed, and bounded."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from http_context import Site, served
from openai_document import faults

from scheduler.protocol import FinishReason
from server.api.responses import background
from server.http.event_recording import CHUNK, EventRecording, read_recording
from server.log.database import LogUnavailable

DETACHED = {"input": "Hello", "background": True}


def numbers(text: str) -> list[int]:
    return [
        int(line.partition('"sequence_number":')[2].partition(",")[0]) for line in text.splitlines() if "data" in line
    ]


async def begin(site: Site, **body: Any) -> str:
    """A response in the background that has said two tokens and waits."""
    site.engine.pause_after = 2
    answer = await site.http.post("/v1/responses", json={**DETACHED, **body})
    assert answer.status_code == 200, answer.text
    assert (answer.json()["status"], answer.json()["background"]) == ("queued", True)
    assert not faults("Response", answer.json())
    return str(answer.json()["id"])


async def until(site: Site, id: str, *status: str) -> Any:
    """The response once it has one of these statuses."""
    while (body := (await site.http.get(f"/v1/responses/{id}")).json())["status"] not in status:
        await asyncio.sleep(0.01)
    return body


@served()
async def test_it_runs_without_a_connection(site: Site) -> None:
    id = await begin(site)
    running = await until(site, id, "in_progress")
    assert not faults("Response", running)
    site.engine.go.set()
    done = await until(site, id, "completed")
    assert done["output"][0]["content"][0]["text"] == "Hello there, friend."
    follow = (await site.http.post("/v1/responses", json={"input": "And?", "previous_response_id": id})).json()
    assert follow["usage"]["input_tokens_details"]["cached_tokens"] > 10
    assert follow["id"].rpartition("_")[0] == id.rpartition("_")[0]


@pytest.mark.parametrize("after", [None, 0, 3, 7])
@served()
async def test_its_events_are_the_same_whenever_one_comes(site: Site, after: int | None) -> None:
    id = await begin(site)
    await until(site, id, "in_progress")
    where = f"/v1/responses/{id}?stream=true" + ("" if after is None else f"&starting_after={after}")
    live = asyncio.create_task(site.http.get(where))
    await asyncio.sleep(0.02)
    site.engine.go.set()
    told = (await live).text
    start = 0 if after is None else after + 1
    assert numbers(told)[0] == start
    assert numbers(told) == [*range(start, numbers(told)[-1] + 1)]
    assert "event: response.completed" in told
    await until(site, id, "completed")
    assert (await site.http.get(where)).text == told
    if start == 0:
        names = [line[7:] for line in told.splitlines() if line.startswith("event: ")]
        assert names[:4] == [
            "response.created",
            "response.queued",
            "response.in_progress",
            "response.output_item.added",
        ]


@served()
async def test_streamed_from_the_start_it_outlives_its_reader(site: Site) -> None:
    site.engine.pause_after = 2
    reader = asyncio.create_task(site.http.post("/v1/responses", json={**DETACHED, "stream": True}))
    while not site.app.state.background._running:
        await asyncio.sleep(0.01)
    (id,) = [response for _, response in site.app.state.background._running]
    reader.cancel()
    await asyncio.sleep(0.02)
    assert site.engine.running
    site.engine.go.set()
    await until(site, id, "completed")


@served()
async def test_a_cancelled_one_is_kept_as_far_as_it_came(site: Site) -> None:
    id = await begin(site)
    await until(site, id, "in_progress")
    cancelled = (await site.http.post(f"/v1/responses/{id}/cancel")).json()
    assert cancelled["status"] == "cancelled"
    assert not faults("Response", cancelled)
    assert not site.engine.running
    assert (await site.http.get(f"/v1/responses/{id}")).json() == cancelled
    assert (await site.http.post(f"/v1/responses/{id}/cancel")).json() == cancelled
    assert [item["status"] for item in cancelled["output"]] == ["incomplete"]
    assert cancelled["output"][0]["content"][0]["text"]
    site.engine.pause_after = None
    follow = await site.http.post("/v1/responses", json={"input": "And?", "previous_response_id": id})
    assert follow.status_code == 200


def events_in(text: str) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


@served()
async def test_the_events_of_a_cancelled_one_have_an_end(site: Site) -> None:
    """For who follows it while it is cancelled, and for who reads them afterwards."""
    id = await begin(site)
    await until(site, id, "in_progress")
    where = f"/v1/responses/{id}?stream=true"
    live = asyncio.create_task(site.http.get(where))
    await asyncio.sleep(0.02)
    cancelled = (await site.http.post(f"/v1/responses/{id}/cancel")).json()
    told = (await live).text
    assert [event["type"] for event in events_in(told)[-4:]] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert numbers(told) == [*range(len(numbers(told)))]
    assert events_in(told)[-1]["response"] == cancelled
    assert events_in(told)[-2]["item"] == cancelled["output"][0]
    assert (await site.http.get(where)).text == told
    for event in events_in(told):
        assert not faults("ResponseStreamEvent", event)


@served()
async def test_a_cancel_that_meets_a_commit_loses_and_the_events_go_on_to_their_end(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "CANCEL_SECONDS", 0.02)
    id = await begin(site)
    await until(site, id, "in_progress")
    where = f"/v1/responses/{id}?stream=true"
    live = asyncio.create_task(site.http.get(where))
    commit, committed = site.log.commit, asyncio.Event()

    async def slow(*args: Any, **fields: Any) -> None:
        await commit(*args, **fields)
        committed.set()
        await asyncio.sleep(60.0)

    monkeypatch.setattr(site.log, "commit", slow)
    site.engine.go.set()
    await committed.wait()
    assert (await site.http.post(f"/v1/responses/{id}/cancel")).json()["status"] == "completed"
    told = (await live).text
    assert events_in(told)[-1]["type"] == "response.completed"
    assert numbers(told) == [*range(len(numbers(told)))]
    assert (await site.http.get(where)).text == told


@served()
async def test_a_cancel_before_a_commit_that_hangs_wins_though_the_reply_was_whole(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "CANCEL_SECONDS", 0.02)
    id = await begin(site)
    await until(site, id, "in_progress")
    asked = asyncio.Event()

    async def never(*args: Any, **fields: Any) -> None:
        asked.set()
        await asyncio.sleep(60.0)

    monkeypatch.setattr(site.log, "commit", never)
    site.engine.go.set()
    await asked.wait()
    cancelled = (await site.http.post(f"/v1/responses/{id}/cancel")).json()
    assert (cancelled["status"], cancelled["completed_at"]) == ("cancelled", None)
    told = (await site.http.get(f"/v1/responses/{id}?stream=true")).text
    assert events_in(told)[-1] == {
        "type": "response.incomplete",
        "sequence_number": len(numbers(told)) - 1,
        "response": cancelled,
    }
    assert numbers(told) == [*range(len(numbers(told)))]


@served()
async def test_a_cancel_that_is_sent_again_changes_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    id = await begin(site)
    await until(site, id, "in_progress")
    commit, looked, go = site.log.commit, asyncio.Event(), asyncio.Event()

    async def slow(*where: Any, **options: Any) -> None:
        looked.set()
        await go.wait()
        await commit(*where, **options)

    monkeypatch.setattr(site.log, "commit", slow)
    first = asyncio.create_task(site.http.post(f"/v1/responses/{id}/cancel"))
    await looked.wait()  # how it ended is being written
    second = asyncio.create_task(site.http.post(f"/v1/responses/{id}/cancel"))
    await asyncio.sleep(0.02)
    go.set()
    assert [(await one).json()["status"] for one in (first, second)] == ["cancelled", "cancelled"]


@served()
async def test_one_that_fails_is_failed_and_not_lost(site: Site) -> None:
    site.engine.ends_badly = FinishReason.ERROR
    site.engine.pause_after = None
    id = (await site.http.post("/v1/responses", json=DETACHED)).json()["id"]
    failed = await until(site, id, "failed")
    assert failed["error"]["code"] == "server_error"
    assert "secret" not in str(failed)
    told = (await site.http.get(f"/v1/responses/{id}?stream=true")).text
    assert told.rstrip().rpartition("event: ")[2].startswith("response.failed")
    assert numbers(told) == [*range(len(numbers(told)))]
    assert [item["status"] for item in failed["output"]] == ["incomplete"]


@served()
async def test_a_conversation_is_busy_while_one_runs_on_it(site: Site) -> None:
    conversation = (await site.http.post("/v1/conversations", json={})).json()["id"]
    id = await begin(site, conversation=conversation)
    busy = await site.http.post("/v1/responses", json={"input": "And?", "conversation": conversation})
    assert busy.status_code == 409
    assert busy.headers["retry-after"]
    assert (await site.http.delete(f"/v1/conversations/{conversation}")).status_code == 200
    assert (await site.http.get(f"/v1/responses/{id}")).status_code == 404
    assert not site.engine.running


@served()
async def test_deleting_one_that_runs_ends_it(site: Site) -> None:
    id = await begin(site)
    assert (await site.http.delete(f"/v1/responses/{id}")).json() == {
        "object": "response.deleted",
        "id": id,
        "deleted": True,
    }
    assert not site.engine.running
    assert (await site.http.get(f"/v1/responses/{id}")).status_code == 404
    assert (await site.http.get("/v1/sessions")).json()["data"] == []


@served()
async def test_there_is_room_for_so_many(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MOST", 1)
    id = await begin(site)
    refused = await site.http.post("/v1/responses", json=DETACHED)
    assert refused.status_code == 429
    assert refused.headers["retry-after"]
    site.engine.go.set()
    await until(site, id, "completed")
    for _ in range(1000):  # its place is free a moment after it can be seen to be over
        if (answer := await site.http.post("/v1/responses", json=DETACHED)).status_code != 429:
            break
        await asyncio.sleep(0.01)
    assert answer.status_code == 200


@served()
async def test_only_what_runs_on_its_own_is_cancelled_or_followed(site: Site) -> None:
    id = (await site.http.post("/v1/responses", json={"input": "Hello"})).json()["id"]
    for answer in (
        await site.http.post(f"/v1/responses/{id}/cancel"),
        await site.http.get(f"/v1/responses/{id}?stream=true"),
        await site.http.get(f"/v1/responses/{id}?starting_after=1"),
    ):
        assert answer.status_code == 400
        assert not faults("ErrorResponse", answer.json())


async def test_a_recording_is_followed_from_anywhere_and_read_back() -> None:
    told = [b"event: e\ndata: %d\n\n" % number for number in range(3 * CHUNK + 5)]
    recording = EventRecording()
    for event in told[: CHUNK + 3]:
        recording.add(event)
    readers = [
        asyncio.create_task(gathered(recording, start)) for start in (0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 1, 3 * CHUNK)
    ]
    await asyncio.sleep(0)
    for event in told[CHUNK + 3 :]:
        recording.add(event)
        if event == told[2 * CHUNK]:
            await asyncio.sleep(0)
    recording.end()
    for start, reader in zip((0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 1, 3 * CHUNK), readers, strict=True):
        assert await reader == told[start:]
    assert await gathered(recording, len(told) + 9) == []
    for start in (0, 5, 2 * CHUNK, len(told)):
        assert read_recording(recording.whole([b"event: last\n\n"]), start) == [*told, b"event: last\n\n"][start:]


async def gathered(recording: EventRecording, start: int) -> list[bytes]:
    return [event async for event in recording.follow(start)]


@served()
async def test_one_that_has_hardly_begun_is_cancelled_for_good(site: Site) -> None:
    id = await begin(site)
    assert (await site.http.post(f"/v1/responses/{id}/cancel")).json()["status"] == "cancelled"
    assert (await site.http.get(f"/v1/responses/{id}")).json()["status"] == "cancelled"


@pytest.mark.parametrize("verb", ["GET", "cancel", "DELETE"])
@served()
async def test_one_whose_end_could_not_be_stored_has_failed(
    site: Site, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database was away just then, and is there again."""
    id = await begin(site)
    await until(site, id, "in_progress")

    async def failing(*_: Any, **__: Any) -> Any:
        raise LogUnavailable("away")

    with monkeypatch.context() as away:
        for of, name in ((site.log, "commit"), (site.log.responses, "put")):
            away.setattr(of, name, failing)
        site.engine.go.set()
        while site.app.state.background._running:
            await asyncio.sleep(0.01)
    if verb == "DELETE":
        assert (await site.http.delete(f"/v1/responses/{id}")).status_code == 200
        assert (await site.http.get(f"/v1/responses/{id}")).status_code == 404
        assert (await site.http.get("/v1/sessions")).json()["data"] == []
        return
    path = f"/v1/responses/{id}"
    answer = await (site.http.get(path) if verb == "GET" else site.http.post(f"{path}/cancel"))
    assert (answer.status_code, answer.json()["status"]) == (200, "failed")
    assert answer.json()["error"]["code"] == "server_error"
    assert not faults("Response", answer.json())
    assert (await site.http.get(path, params={"stream": True})).text.count("event: response.failed") == 1


@served()
async def test_a_cancel_from_another_server_ends_that_response_only(site: Site) -> None:
    id = await begin(site)
    await until(site, id, "in_progress")
    _, session, key = id.split("_")
    site.app.state.background.cancel_unwanted("default", session, "another")
    site.app.state.background.cancel_unwanted("other", session, key)
    await asyncio.gather(*site.app.state.background._cancelling)
    assert (await site.http.get(f"/v1/responses/{id}")).json()["status"] == "in_progress"
    site.app.state.background.cancel_unwanted("default", session, key)
    await until(site, id, "cancelled")


@served()
async def test_a_chain_stays_whose_response_is_deleted_while_the_next_one_ends(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stored between the deletion and the look at whether anything is left."""
    first = (await site.http.post("/v1/responses", json={"input": "Hello"})).json()["id"]
    site.engine.pause_after = 2
    following = asyncio.create_task(
        site.http.post("/v1/responses", json={"input": "And?", "previous_response_id": first})
    )
    while len(site.engine.submitted) < 2:
        await asyncio.sleep(0.01)
    delete = site.log.responses.delete

    async def slow(*where: str) -> int | None:
        left = await delete(*where)
        site.engine.go.set()
        await following
        return left

    monkeypatch.setattr(site.log.responses, "delete", slow)
    assert (await site.http.delete(f"/v1/responses/{first}")).status_code == 200
    second = (await following).json()["id"]
    assert (await site.http.get(f"/v1/responses/{second}")).json()["status"] == "completed"
    assert (await site.http.delete(f"/v1/responses/{second}")).status_code == 200
    assert (await site.http.get("/v1/sessions")).json()["data"] == []


@served()
async def test_what_has_come_is_there_to_see_before_the_end(site: Site) -> None:
    """A response that nobody streams is followed all the same."""
    site.engine.reply = "Hello there, friend. " * 6
    site.engine.pause_after = 2
    name = (await site.http.post("/v1/responses", json=DETACHED)).json()["id"]
    await until(site, name, "in_progress")
    site.engine.pause_after = 9
    site.engine.go.set()
    site.engine.go.clear()

    async def said() -> str:
        body = (await site.http.get(f"/v1/responses/{name}")).json()
        return "".join(part["text"] for item in body["output"] for part in item["content"])

    while len(before := await said()) < len("Hello there, friend."):
        await asyncio.sleep(0.01)
    site.engine.pause_after = None
    site.engine.go.set()
    await until(site, name, "completed")
    whole = await said()
    assert whole.startswith(before)
    assert len(before) < len(whole)
