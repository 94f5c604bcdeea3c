"""`/v1/batches`: every line has one result, whatever ends the server; bad lines, cancels, expiry, keys, tenants."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import httpx2
import msgspec
import openai
import pytest
from fake_engine import EMBEDDING
from http_context import HELLO, Site, served, site

from scheduler.protocol import FinishReason
from server.api.batches import batches
from server.app import begin_batches
from server.batches import batch_runner
from server.batches.batch_record import BatchRecord
from server.engine.engine import TurnRefused
from server.middleware.key_file import KeyFile, new_key, write_keys

KEYS = {"ann": "key-a", "bob": "key-b"}
ANN, BOB = ({"authorization": f"Bearer {key}"} for key in KEYS.values())
CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
OVER = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, url: str = CHAT, **body: Any) -> bytes:
    asked = {"messages": HELLO, **body} if url == CHAT else body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": asked}).encode() + b"\n"


async def begin(made: Site, *lines: bytes, endpoint: str = CHAT, headers: Any = None, **fields: Any) -> Any:
    """Upload the lines and create a batch of them."""
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("lines.jsonl", b"".join(lines))}}
    file = (await made.http.post("/v1/files", headers=headers, **form)).json()
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h", **fields}
    answer = await made.http.post("/v1/batches", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def until(made: Site, batch: Any, *statuses: str, headers: Any = None) -> Any:
    """The batch, when it has one of these statuses; "": when it is over."""
    while True:
        batch = (await made.http.get(f"/v1/batches/{batch['id']}", headers=headers)).json()
        if batch["status"] in (statuses or OVER):
            return batch
        await asyncio.sleep(0.01)


async def results(made: Site, file: str | None, headers: Any = None) -> dict[Any, Any]:
    """The lines of a file of results by their custom_id; each is there once."""
    if file is None:
        return {}
    text = (await made.http.get(f"/v1/files/{file}/content", headers=headers)).text
    found = [json.loads(one) for one in text.splitlines()]
    assert len({one["id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


@served(KEYS)
async def test_openais_client_runs_a_batch(site: Site) -> None:
    begin_batches(site.app)
    transport: Any = httpx2.ASGITransport(site.app)
    async with httpx2.AsyncClient(transport=transport) as http:
        ai = openai.AsyncOpenAI(api_key="key-a", base_url="http://warm/v1", http_client=http, max_retries=0)
        file = await ai.files.create(file=("in.jsonl", line("one") + line("two", n=2)), purpose="batch")
        batch = await ai.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"for": "test"}
        )
        assert batch.status == "validating"
        while batch.status not in OVER:
            await asyncio.sleep(0.01)
            batch = await ai.batches.retrieve(batch.id)
        assert (batch.status, batch.metadata, batch.errors) == ("completed", {"for": "test"}, None)
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 2, "completed": 2, "failed": 0}
        assert batch.output_file_id is not None
        assert batch.error_file_id is None
        told = [json.loads(one) for one in (await ai.files.content(batch.output_file_id)).text.splitlines()]
        answers = {one["custom_id"]: one["response"] for one in told}
        assert {*answers} == {"one", "two"}
        assert answers["one"]["status_code"] == 200
        assert [c["message"]["content"] for c in answers["two"]["body"]["choices"]] == ["Hello there, friend."] * 2
        assert (await ai.files.retrieve(batch.output_file_id)).purpose == "batch_output"
        assert [one.id async for one in ai.batches.list(limit=1)] == [batch.id]
        with pytest.raises(openai.ConflictError):
            await ai.batches.cancel(batch.id)
        with pytest.raises(openai.NotFoundError):
            await ai.batches.retrieve("batch_x")
        assert (await ai.files.delete(file.id)).deleted
    assert all(submit.spare for submit in site.engine.submitted)
    usage = (await site.http.get("/v1/usage", headers=ANN)).json()["total"]
    assert usage["requests"] == 2
    for path in (f"/v1/batches/{batch.id}", f"/v1/files/{batch.output_file_id}/content"):
        assert (await site.http.get(path, headers=BOB)).status_code == 404
    assert (await site.http.post(f"/v1/batches/{batch.id}/cancel", headers=BOB)).status_code == 404
    assert (await site.http.get("/v1/batches", headers=BOB)).json()["data"] == []
    body = {"input_file_id": batch.output_file_id, "endpoint": CHAT, "completion_window": "24h"}
    assert (await site.http.post("/v1/batches", json=body, headers=BOB)).status_code == 400


@served()
async def test_bad_lines_are_told_in_the_error_file_and_the_others_run(site: Site) -> None:
    begin_batches(site.app)
    lines = [line("a"), b"{not JSON}\n", line("a"), line("b", temperature=-1), line("c", model="x"), line("d")]
    batch = await until(site, await begin(site, *lines))
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 6, "completed": 2, "failed": 4}
    assert {*await results(site, batch["output_file_id"])} == {"a", "d"}
    errors = await results(site, batch["error_file_id"])
    assert errors[None]["error"]["code"] == "invalid_json_line"
    assert errors["a"]["error"]["code"] == "duplicate_custom_id"
    assert errors["b"]["response"]["status_code"] == 400
    assert errors["b"]["response"]["body"]["error"]["param"] == "temperature"
    assert errors["c"]["response"]["status_code"] == 404


@pytest.mark.parametrize(
    ("endpoint", "body"), [("/v1/completions", {"prompt": "Once"}), ("/v1/responses", {"input": "Hello"})]
)
@served()
async def test_other_endpoints_can_be_asked(site: Site, endpoint: str, body: Any) -> None:
    begin_batches(site.app)
    batch = await until(site, await begin(site, line("a", endpoint, **body), endpoint=endpoint))
    answer = (await results(site, batch["output_file_id"]))["a"]["response"]
    assert "friend." in json.dumps(answer["body"])


@served()
async def test_texts_are_embedded_when_nobody_waits(site: Site) -> None:
    site.engine.facts = EMBEDDING
    begin_batches(site.app)
    made = await begin(site, line("a", "/v1/embeddings", input=["Hello", "Bye"]), endpoint="/v1/embeddings")
    answer = (await results(site, (await until(site, made))["output_file_id"]))["a"]["response"]
    assert len(answer["body"]["data"]) == 2
    assert site.engine.spare


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-CANARY"}, "input_file_id"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
        ({"other": 1}, "other"),
    ],
)
@served()
async def test_a_wrong_batch_is_a_400(site: Site, change: Any, param: str) -> None:
    body = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h", **change}
    answer = await site.http.post("/v1/batches", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert "CANARY" not in answer.text


@served()
async def test_batches_are_listed_in_pages_and_not_too_many_are_taken(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MOST", 2)
    ids = {(await begin(site, line("a")))["id"] for _ in range(2)}  # none runs
    refused = await site.http.post(
        "/v1/batches",
        json={
            "input_file_id": (await site.http.get("/v1/files")).json()["first_id"],
            "endpoint": CHAT,
            "completion_window": "24h",
        },
    )
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_batches")
    first = (await site.http.get("/v1/batches?limit=1")).json()
    rest = (await site.http.get(f"/v1/batches?after={first['last_id']}")).json()
    assert {first["data"][0]["id"], rest["data"][0]["id"]} == ids
    assert (first["has_more"], rest["has_more"]) == (True, False)
    assert (await site.http.get("/v1/batches?after=x")).status_code == 400


@pytest.mark.parametrize(
    ("data", "code"), [(b"", "empty_file"), (b"\n \n", "empty_file"), (line("a") * 3, "too_many_lines")]
)
@served()
async def test_a_file_without_requests_or_with_too_many_fails(
    site: Site, monkeypatch: pytest.MonkeyPatch, data: bytes, code: str
) -> None:
    monkeypatch.setattr(batch_runner, "MOST_LINES", 2)
    begin_batches(site.app)
    batch = await until(site, await begin(site, data))
    assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", code)
    assert batch["failed_at"]
    assert not site.engine.submitted


@served()
async def test_a_batch_is_cancelled_and_keeps_what_it_has(site: Site) -> None:
    begin_batches(site.app)
    site.engine.pause_after = 2
    batch = await begin(site, line("bad", temperature=-1), *(line(f"{n}") for n in range(20)))
    while len(site.engine.submitted) < batch_runner.AT_ONCE:
        await asyncio.sleep(0.01)
    while not (await until(site, batch, "in_progress"))["request_counts"]["failed"]:
        await asyncio.sleep(0.01)
    assert (await site.http.delete(f"/v1/files/{batch['input_file_id']}")).json()["error"]["code"] == "file_in_use"
    cancelled = (await site.http.post(f"/v1/batches/{batch['id']}/cancel")).json()
    assert (cancelled["status"], cancelled["output_file_id"]) == ("cancelling", None)
    batch = await until(site, batch)
    assert (batch["status"], batch["output_file_id"]) == ("cancelled", None)
    assert {*await results(site, batch["error_file_id"])} == {"bad"}
    assert batch["cancelled_at"] >= batch["cancelling_at"]
    assert not site.engine.running
    assert len(site.engine.submitted) <= batch_runner.AT_ONCE
    assert (await site.http.delete(f"/v1/files/{batch['input_file_id']}")).status_code == 200


@served()
async def test_a_batch_expires_while_it_runs(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "WINDOW_SECONDS", 1)
    begin_batches(site.app)
    site.engine.pause_after = 2
    batch = await until(site, await begin(site, line("a"), line("b")))
    assert batch["status"] == "expired"
    assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
    errors = await results(site, batch["error_file_id"])
    assert errors["a"]["error"]["code"] == errors["b"]["error"]["code"] == "batch_expired"


@served()
async def test_what_has_a_result_before_the_batch_expires_keeps_it(site: Site) -> None:
    begin_batches(site.app)
    site.engine.pause_after = 2
    batch, runner = await begin(site, line("a"), line("b", temperature=-1)), site.app.state.batches
    while not (await until(site, batch, "validating", "in_progress"))["request_counts"]["failed"]:
        await asyncio.sleep(0.01)
    await runner.close()
    runner.records.put(msgspec.structs.replace(runner.records.get("default", batch["id"]), expires_at=1))
    runner.start(runner._ask, runner._ready)
    batch = await until(site, batch)
    assert batch["status"] == "expired"
    errors = await results(site, batch["error_file_id"])
    assert errors["a"]["error"]["code"] == "batch_expired"
    assert errors["b"]["response"]["status_code"] == 400


@served()
async def test_a_request_that_is_refused_for_now_is_tried_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "LONGEST_WAIT", 0.01)
    begin_batches(site.app)
    site.engine.refusal = TurnRefused("queue_full", "The queue is full.", 1)
    batch = await begin(site, line("a"))
    while len(site.engine.submitted) < 3:
        await asyncio.sleep(0.01)
    site.engine.refusal = None
    batch = await until(site, batch)
    assert {*await results(site, batch["output_file_id"])} == {"a"}
    site.engine.submitted.clear()
    site.engine.ends_badly = FinishReason.ERROR
    batch = await until(site, await begin(site, line("a")))
    assert (await results(site, batch["error_file_id"]))["a"]["response"]["status_code"] == 500
    assert len(site.engine.submitted) == batch_runner.TRIES


@served()
async def test_lines_of_one_session_wait_for_each_other(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "LONGEST_WAIT", 0.01)
    begin_batches(site.app)
    batch = await until(site, await begin(site, *(line(f"{n}", session_id="s") for n in range(4))))
    assert batch["request_counts"]["completed"] == 4
    assert (await site.http.get("/v1/sessions/s")).json()["turns"] == 4


@asynccontextmanager
async def life(folder: Path) -> Any:
    """One life of a server over the same log and files."""
    async with site(storage=folder) as made:
        begin_batches(made.app)
        yield made


def prompts(made: Site) -> Counter[bytes]:
    return Counter(submit.prompt for submit in made.engine.submitted)


async def test_a_batch_goes_on_after_a_restart_and_nothing_is_lost_or_done_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "AT_ONCE", 2)
    lines = [line(f"{n}", messages=[{"role": "user", "content": f"Number {n}"}]) for n in range(6)]
    lines.insert(3, b"bad\n")
    async with life(tmp_path) as made:
        runner = made.app.state.batches
        ask, answers = runner._ask, 0

        async def stopping(*given: Any) -> Any:
            """Three answers, and no more."""
            nonlocal answers
            answers += 1
            return await (ask(*given) if answers <= 3 else asyncio.Event().wait())

        runner._ask = stopping
        batch = await begin(made, *lines)
        while (await until(made, batch, "validating", "in_progress"))["request_counts"]["completed"] < 3:
            await asyncio.sleep(0.01)
    record = folder_record(tmp_path, batch["id"])
    assert record.status == "in_progress"
    written = tmp_path / "batches" / f"{batch['id']}.output"
    done = {json.loads(one)["custom_id"] for one in written.read_bytes().splitlines()}
    assert len(done) == 3
    with written.open("ab") as journal:
        journal.write(b'{"id": "batch_req_1_7", "cust')  # kill -9 in the middle of a write
    async with life(tmp_path) as made:
        batch = await until(made, batch)
        assert batch["request_counts"] == {"total": 7, "completed": 6, "failed": 1}
        assert {*await results(made, batch["output_file_id"])} == {f"{n}" for n in range(6)}
        assert {*await results(made, batch["error_file_id"])} == {None}
        assert len(prompts(made)) == 6 - len(done)
        assert set(prompts(made).values()) == {1}
    async with life(tmp_path) as made:
        assert (await until(made, batch)) == batch
        await asyncio.sleep(0.05)
        assert not made.engine.submitted


def folder_record(folder: Path, id: str) -> BatchRecord:
    """The record as it is on disk."""
    return msgspec.json.decode((folder / "batches" / f"{id}.json").read_bytes(), type=BatchRecord)


async def test_a_server_that_dies_while_it_publishes_the_results_publishes_them_once(tmp_path: Path) -> None:
    async with life(tmp_path) as made:
        batch = await begin(made, line("a"))
        put, runner = made.app.state.batches.records.put, made.app.state.batches

        def dying(record: BatchRecord) -> None:
            if record.status == "completed":
                raise OSError(5, "as if it were dead")
            put(record)

        runner.records.put = dying
        await until(made, batch, "finalizing")
        while not runner.files.of_tenant("default")[1:]:  # the output is there already
            await asyncio.sleep(0.01)
    assert folder_record(tmp_path, batch["id"]).ending == "completed"
    async with life(tmp_path) as made:
        batch = await until(made, batch)
        assert {*await results(made, batch["output_file_id"])} == {"a"}
        assert not made.engine.submitted
        assert len((await made.http.get("/v1/files")).json()["data"]) == 2
        assert sorted(path.suffix for path in (tmp_path / "batches").iterdir()) == [".json"]


@served()
async def test_a_turn_of_a_session_that_was_committed_before_the_crash_is_not_run_again(site: Site) -> None:
    begin_batches(site.app)
    runner = site.app.state.batches
    ask, asked = runner._ask, []

    async def dying(*given: Any) -> Any:
        """Answered and committed, and then the server dies: nobody hears the answer."""
        asked.append(await ask(*given))
        await asyncio.Event().wait()

    runner._ask = dying
    batch = await begin(site, line("a", session_id="s"), line("b", "/v1/responses"))
    while not asked:
        await asyncio.sleep(0.01)
    await runner.close()
    runner.start(ask, site.app.state.dispatch.free_for)
    batch = await until(site, batch)
    assert {*await results(site, batch["output_file_id"])} == {"a"}
    assert (await site.http.get("/v1/sessions/s")).json()["turns"] == 1
    assert len(site.engine.submitted) == 1


async def test_a_batch_ends_with_its_key(tmp_path: Path) -> None:
    (key, entry), (_, other) = new_key("ann", None, None), new_key("ann", None, None)
    write_keys(tmp_path / "keys.json", [entry, other])
    headers = {"authorization": f"Bearer {key}"}
    file = KeyFile(tmp_path / "keys.json")
    async with site(key_file=file) as made:
        batch = await begin(made, line("a"), headers=headers)
        write_keys(tmp_path / "keys.json", [other])
        file._looked -= 10
        assert made.app.state.batches._find_key("ann", entry.id) is None
        begin_batches(made.app)
        while not (record := made.app.state.batches.records.get("ann", batch["id"])).is_over:
            await asyncio.sleep(0.01)
        assert (record.status, record.faults[0].code) == ("failed", "key_revoked")
        assert not made.engine.submitted


@served()
async def test_old_batches_are_forgotten(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_batches(site.app)
    batch = await until(site, await begin(site, line("a")))
    later = time.time() + 31 * 86_400
    monkeypatch.setattr("server.batches.batch_record.time.time", lambda: later)
    site.app.state.batches.records.forget_old()
    assert (await site.http.get(f"/v1/batches/{batch['id']}")).status_code == 404
