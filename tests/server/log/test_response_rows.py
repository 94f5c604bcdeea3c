"""Responses in the log: written with their turn, read back, gone with their session."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from log_kit import Where, assistant, opened, read, sqlite, turn, user, with_log

from server.log.database import LogFull
from server.log.response_rows import StoredResponse, TurnExtras
from server.log.retries import Idempotency
from server.log.session_log import SessionLog
from server.log.timeline import SessionMoved, UnknownSession, at_turn, turn_of_row

BODY = json.dumps({"id": "resp_s_k", "status": "completed", "background": True, "text": "ü\u0000"})
STORED = StoredResponse("k", "completed", 5, BODY, '[{"id":"msg"}]', events=b"\x00\x01")


async def running(where: Where, status: str) -> None:
    """A server that ended while a response had this status."""
    async with opened(where, "one") as log:
        if await log.get("a", "s") is None:
            await log.create("a", "s")
        await log.responses.put("a", "s", replace(STORED, status=status))


async def test_it_is_written_with_its_turn_or_not_at_all(where: Where) -> None:
    async with opened(where) as log:
        made = await turn(log, "s", "a", "b", extras=TurnExtras(STORED, ttl=60, parent=("p", 3)))
        assert await log.responses.get("a", "s", "k") == replace(STORED, row=1)
        summary = await log.summary("a", "s")
        assert summary is not None
        assert (summary.ttl, summary.parent) == (60, ("p", 3))
        assert turn_of_row((await read(log)).turns, 1) == made
        with pytest.raises(SessionMoved):
            await turn(log, "s", "c", "d", extras=TurnExtras(replace(STORED, key="l")), expect=1)
        assert await log.responses.get("a", "s", "l") is None
        for tenant, session, key in (("b", "s", "k"), ("a", "t", "k"), ("a", "s", "K")):
            assert await log.responses.get(tenant, session, key) is None
    async with opened(where) as log:
        await same(log, replace(STORED, row=1))


async def same(log: SessionLog, stored: StoredResponse | None) -> None:
    assert await log.responses.get("a", "s", "k") == stored


async def test_its_turn_is_found_until_the_timeline_leaves_it(log: SessionLog) -> None:
    for ask in "abc":
        await turn(log, "s", ask, ask.upper())
    record = await read(log)
    assert [turn.row for turn in record.turns] == [1, 2, 3]
    past = at_turn(record, record.turns[1])
    assert (past.tokens, past.rendered, past.version) == ([*map(ord, "aAbB")], 4, 0)
    await log.rewind("a", "s", turn=2)
    await turn(log, "s", "d", "D")
    turns = (await read(log)).turns
    assert [turn.row for turn in turns] == [1, 2, 5]
    assert turn_of_row(turns, 3) is None


async def test_messages_are_revised_and_what_was_said_before_stays(where: Where) -> None:
    async with opened(where) as log:
        for ask in "abc":
            await turn(log, "s", ask, ask.upper())
        await log.revise("a", "s", 6, [user("d")])
        record = await read(log)
        assert (record.rendered, len(record.tokens)) == (6, 6)
        await log.revise("a", "s", 2, [assistant("B"), *record.messages[4:]])
        record = await read(log)
        assert [m.content for m in record.messages] == ["a", "A", "B", "c", "C", "d"]
        assert (record.rendered, record.tokens) == (2, [*map(ord, "aA")])
    async with opened(where) as log:
        await read(log)


@pytest.mark.parametrize("how", ["delete", "expire", "beneath a new one"])
async def test_it_goes_with_its_session(log: SessionLog, how: str) -> None:
    await turn(log, "s", "a", "b", extras=TurnExtras(STORED, ttl=1))
    await turn(log, "t", "a", "b", extras=TurnExtras(STORED))
    if how == "delete":
        await log.delete("a", "s")
    elif how == "expire":
        assert await log.expire(2**33) == [("a", "s")]
    else:
        await asyncio.sleep(1.1)
    assert await log.responses.get("a", "s", "k") is None
    await log.create("a", "s")
    assert await log.responses.get("a", "s", "k") is None
    assert await log.responses.get("a", "t", "k") is not None


async def test_it_is_deleted_alone(log: SessionLog) -> None:
    await turn(log, "s", "a", "b", extras=TurnExtras(STORED))
    await turn(log, "s", "c", "d", extras=TurnExtras(replace(STORED, key="l")))
    assert await log.responses.delete("a", "s", "x") is None
    assert await log.responses.delete("b", "s", "k") is None
    assert await log.responses.delete("a", "s", "k") == 1
    assert await log.responses.delete("a", "s", "k") is None
    assert await log.responses.delete("a", "s", "l") == 0
    assert len((await read(log)).turns) == 2


async def test_what_a_key_has_made_is_found_by_it(log: SessionLog) -> None:
    await turn(log, "s", "a", "b", extras=TurnExtras(STORED), idempotency=Idempotency("one", "hash"))
    assert await log.responses.of_key("a", "s", "one") == ("hash", replace(STORED, row=1))
    assert await log.responses.of_key("a", "s", "two") is None
    assert await log.responses.of_key("b", "s", "one") is None
    await log.responses.delete("a", "s", "k")
    assert await log.responses.of_key("a", "s", "one") == ("hash", None)


@pytest.mark.parametrize("status", ["queued", "in_progress"])
async def test_what_ran_when_its_server_ended_has_failed(where: Where, status: str) -> None:
    await running(where, status)
    async with opened(where, "two") as log:
        other = await log.responses.get("a", "s", "k")
    assert other is not None
    assert other.status == status
    async with opened(where, "one") as log:
        found = await log.responses.get("a", "s", "k")
    assert found is not None
    assert found.status == "failed"
    body = json.loads(found.body)
    assert (body["status"], body["error"]["code"]) == ("failed", "server_error")
    assert body["text"] == "ü\u0000"
    assert found.inputs == STORED.inputs


async def test_a_full_disk_is_no_reason_not_to_start(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    await running(where, "queued")

    def full(*_: object) -> None:
        raise LogFull("full")

    with monkeypatch.context() as patch:
        patch.setattr("server.log.response_rows.put", full)
        log = SessionLog(where, server="one")
    found = await log.responses.settle("a", "s", "k")
    assert found is not None
    assert found.status == "failed"
    await log.close()


async def test_what_was_over_when_its_server_ended_stays(where: Where) -> None:
    await running(where, "completed")
    await running(where, "completed")
    async with opened(where) as log:
        await same(log, STORED)


async def test_without_its_session_it_is_not_written(log: SessionLog) -> None:
    with pytest.raises(UnknownSession):
        await log.responses.put("a", "s", STORED)


@pytest.mark.parametrize(
    "change", ["body = body || ' '", "status = 'failed'", "inputs = '[]'", "events = x'00'", "row = 9"]
)
def test_one_that_is_damaged_is_not_there(tmp_path: Path, change: str) -> None:
    path = tmp_path / "log.sqlite"
    with_log(path, lambda log: turn(log, "s", "a", "b", extras=TurnExtras(STORED)))
    sqlite(path, f"UPDATE responses SET {change}")
    with_log(path, lambda log: same(log, None))
    with_log(path, read)


def test_a_log_without_their_table_is_salvaged_without_them(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    with_log(path, lambda log: turn(log, "s", "a", "b", extras=TurnExtras(STORED)))
    sqlite(path, "DROP TABLE responses")
    with_log(path, lambda log: same(log, None))


async def test_salvage_keeps_those_that_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    async with opened(path) as log:
        for name in "st":
            await turn(log, name, "a", "b", extras=TurnExtras(STORED))
            await turn(log, name, "c", "d", extras=TurnExtras(replace(STORED, key="l")))
    sqlite(path, "UPDATE responses SET body = 'x' WHERE session_id = 1 AND key = 'l'")
    (page,) = sqlite(path, "SELECT rootpage FROM sqlite_master WHERE name = 'labels'")[0]
    with path.open("r+b") as file:
        size = int.from_bytes(path.read_bytes()[16:18], "big")
        file.seek((page - 1) * size)
        file.write(bytes(size))
    async with opened(path) as log:
        assert log.salvage is not None
        assert log.salvage.whole == 2
        assert await log.responses.get("a", "s", "k") == replace(STORED, row=1)
        assert await log.responses.get("a", "s", "l") is None
        assert await log.responses.get("a", "t", "l") == replace(STORED, key="l", row=2)
    assert sqlite(path, "SELECT count(*) FROM responses") == [(3,)]
