"""What turns have cost, kept with them, and sessions with their forks as one tree."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from http_context import Site, served
from log_kit import as_format_4, opened, read, sqlite, turn

from server.api.sessions.objects import turn_objects
from server.log.database import SessionDamaged
from server.log.listing import MOST_RELATIVES
from server.log.logged_message import LoggedMessage
from server.log.session_log import SessionLog
from server.log.tables import FORMAT
from server.log.timeline import SessionRecord, TurnRecord, UnknownSession

URL = "/v1/sessions"
KEYS = {"ann": "key-a", "bob": "key-b"}
ANN = {"Authorization": "Bearer key-a"}
BOB = {"Authorization": "Bearer key-b"}


async def say(site: Site, name: str, text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    response = await site.http.post(f"{URL}/{name}/chat/completions", json={"messages": messages}, **more)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def get(site: Site, path: str, **more: Any) -> dict[str, Any]:
    response = await site.http.get(f"{URL}/{path}", **more)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def post(site: Site, path: str, **body: Any) -> dict[str, Any]:
    response = await site.http.post(f"{URL}/{path}", json=body)
    assert response.status_code < 300, response.text
    made: dict[str, Any] = response.json()
    return made


# --- receipts -----------------------------------------------------------------------------------------------


@served()
async def test_a_turn_keeps_the_receipt_that_came_with_its_reply(site: Site) -> None:
    first, second = [await say(site, "s", text) for text in ("One", "Two " * 100)]
    turns = (await get(site, "s/turns"))["data"]
    assert [turn["cache"] for turn in turns] == [first["cache"], second["cache"]]
    assert turns[1]["cache"]["new"] > 0
    assert turns[0]["preview"] == "One"
    assert turns[1]["preview"] == ("Two " * 100)[:120]
    replies = [answer["choices"][0]["message"]["content"] for answer in (first, second)]
    assert [turn["reply_preview"] for turn in turns] == [reply[:120] for reply in replies]
    assert len({turn["id"] for turn in turns}) == 2


@served()
async def test_a_streamed_turn_keeps_it_too_and_a_cut_reply_that_of_its_turn(site: Site) -> None:
    messages = [{"role": "user", "content": "One"}]
    response = await site.http.post(f"{URL}/s/chat/completions", json={"messages": messages, "stream": True})
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith('data: {"')]
    told = next(chunk["cache"] for chunk in chunks if chunk.get("cache"))
    (before,) = (await get(site, "s/turns"))["data"]
    assert before["cache"] == told
    await post(site, "s/rewind", tokens=before["prompt_tokens"] + 2)
    (after,) = (await get(site, "s/turns"))["data"]
    assert (after["cache"], after["completion_tokens"]) == (told, 2)
    assert after["id"] != before["id"]


@served()
async def test_what_travelled_in_a_capsule_has_no_receipt(site: Site) -> None:
    await say(site, "s", "One")
    capsule = (await site.http.get(f"{URL}/s/export?kv=false")).content
    headers = {"content-type": "application/zip"}
    assert (await site.http.post(f"{URL}/import?id=t", content=capsule, headers=headers)).status_code == 201
    (turn,) = (await get(site, "t/turns"))["data"]
    assert (turn["cache"], turn["preview"], turn["number"]) == (None, "One", 1)


async def two_turns(log: SessionLog) -> None:
    await turn(log, "s", "a", "bcd")
    await turn(log, "s", "e", "fgh")
    await turn(log, "gone", "a", "b")
    await log.delete("a", "gone")


async def test_a_log_of_format_4_goes_on_without_receipts_for_its_turns(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    async with opened(path) as log:
        await two_turns(log)
    as_format_4(path)
    async with opened(path) as log:
        assert await log.tombstones() == {("a", "gone"): 0}
        await log.swept("a", "gone", 0)
        assert await log.tombstones() == {}
        await turn(log, "s", "i", "jkl", receipt='{"new": 1}')
        await log.fork("a", "s", "t")
        for name in ("s", "t"):
            assert [turn.receipt for turn in (await read(log, name)).turns] == [None, None, '{"new": 1}']
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT version FROM log_format").fetchone() == (FORMAT,)
        indexes = connection.execute("SELECT name FROM sqlite_master WHERE name LIKE 'responses%' AND type = 'index'")
        assert sorted(indexes.fetchall()) == [("responses_chats",), ("responses_running",)]
    async with opened(path) as log:
        await read(log)


async def test_rows_of_format_4_are_salvaged_beside_those_of_format_5(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    async with opened(path) as log:
        await two_turns(log)
    as_format_4(path)
    async with opened(path) as log:
        await turn(log, "s", "i", "jkl", receipt='{"new": 1}')
        await turn(log, "gone too", "a", "b")
        await log.delete("a", "gone too")
    data = bytearray(path.read_bytes())
    data[:16] = b"not a database.."
    path.write_bytes(data)
    async with opened(path) as log:
        assert log.salvage is not None
        assert (log.salvage.whole, log.salvage.refused) == (1, 0)
        assert {*await log.tombstones()} == {("a", "gone"), ("a", "gone too")}
        assert [turn.receipt for turn in (await read(log)).turns] == [None, None, '{"new": 1}']


@pytest.mark.parametrize("receipt", ["NULL", "'{\"new\": 2}'", "x'00'", "7"])
async def test_a_receipt_that_is_not_the_one_that_was_kept_is_damage(tmp_path: Path, receipt: str) -> None:
    path = tmp_path / "log.sqlite"
    async with opened(path) as log:
        await turn(log, "s", "a", "b", receipt='{"new": 1}')
    sqlite(path, f"UPDATE turns SET receipt = {receipt}")
    async with opened(path) as log:
        with pytest.raises(SessionDamaged):
            await log.get("a", "s")


# --- trees --------------------------------------------------------------------------------------------------


@served()
async def test_a_tree_has_a_session_with_its_forks_whichever_is_asked_for(site: Site) -> None:
    for text in ("One", "Two"):
        await say(site, "root", text)
    await post(site, "root/fork", id="fork", turn=1)
    await say(site, "fork", "Other")
    await post(site, "fork/fork", id="again")
    await say(site, "stranger", "One")
    told = [await get(site, f"{name}/tree") for name in ("root", "fork", "again")]
    assert told[0] == told[1] == told[2]
    tree = told[0]
    assert (tree["object"], tree["root"], tree["has_more"]) == ("session.tree", "root", False)
    assert [branch["session"]["id"] for branch in tree["data"]] == ["root", "fork", "again"]
    assert tree["data"][1]["session"] == await get(site, "fork")
    assert tree["data"][1]["turns"] == (await get(site, "fork/turns"))["data"]
    root, fork, again = [[turn["id"] for turn in branch["turns"]] for branch in tree["data"]]
    assert fork == again
    assert (root[0], len(root), len(fork)) == (fork[0], 2, 2)
    assert root[1] != fork[1]


def test_the_same_words_said_again_are_another_turn() -> None:
    def ids(*receipts: str | None) -> list[str]:
        turns = tuple(
            TurnRecord(number, 7, 3 * number - 1, 3 * number, 2 * number, 0, "stop", "f", row=number, receipt=receipt)
            for number, receipt in enumerate(receipts, 1)
        )
        messages = [LoggedMessage("user", "x"), LoggedMessage("assistant", "y")] * len(turns)
        record = SessionRecord("s", [1, 2, 3] * len(turns), messages, "f", 0, turns=turns)
        return [turn.id for turn in turn_objects(record)]

    cheap, dear = ('{"prompt_tokens":2,"reused":{"device":0,"host":0,"disk":0,"remote":0},"recomputed":0,"new":2,'
                   f'"load_ms":{ms}}}' for ms in (0, 1))  # fmt: skip
    one, other = ids(cheap, cheap), ids(dear, cheap)
    assert one == ids(cheap, cheap)
    assert len({*one, *other}) == 4  # what differs once stays different
    assert ids(cheap, None)[0] == one[0]
    assert ids(cheap, None)[1] != one[1]


@served()
async def test_forks_stay_a_family_when_their_parent_is_gone(site: Site) -> None:
    await say(site, "root", "One")
    for name in ("a", "b"):
        await post(site, "root/fork", id=name)
    assert (await site.http.delete(f"{URL}/root")).status_code == 200
    tree = await get(site, "b/tree")
    assert (tree["root"], [branch["session"]["id"] for branch in tree["data"]]) == ("root", ["a", "b"])
    assert tree["data"][0]["turns"] == tree["data"][1]["turns"]


@served()
async def test_names_that_go_in_a_circle_are_no_trap(site: Site) -> None:
    await say(site, "a", "One")
    await post(site, "a/fork", id="b")
    await site.http.delete(f"{URL}/a")
    await post(site, "b/fork", id="a")
    for name in ("a", "b"):
        tree = await get(site, f"{name}/tree")
        assert {branch["session"]["id"] for branch in tree["data"]} == {"a", "b"}


@served(KEYS)
async def test_another_tenants_tree_is_not_there(site: Site) -> None:
    await say(site, "s", "One", headers=ANN)
    await say(site, "t", "One", headers=BOB)
    foreign = await site.http.get(f"{URL}/s/tree", headers=BOB)
    unknown = await site.http.get(f"{URL}/nobody/tree", headers=BOB)
    assert (foreign.status_code, foreign.json()) == (unknown.status_code, unknown.json())
    assert foreign.json()["error"]["code"] == "session_not_found"
    assert len((await get(site, "s/tree", headers=ANN))["data"]) == 1


async def test_a_large_family_is_told_in_part_and_bounded(tmp_path: Path) -> None:
    async with opened(tmp_path / "log.sqlite") as log:
        await turn(log, "s", "a", "b")
        for number in range(MOST_RELATIVES + 5):
            await log.fork("a", "s", f"f{number}")
        family = await log.family("a", "f7")
        assert (family.root, family.has_more, len(family.members)) == ("s", True, MOST_RELATIVES)
        assert family.members[0].id == "s"
        with pytest.raises(UnknownSession):
            await log.family("b", "s")


@served()
async def test_a_branch_that_is_damaged_does_not_hide_the_others(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    await say(site, "s", "One")
    await post(site, "s/fork", id="t")
    reading = site.log.get

    async def damaged(tenant: str, session: str) -> Any:
        if session == "t":
            raise SessionDamaged("a row of the session log is damaged")
        return await reading(tenant, session)

    monkeypatch.setattr(site.log, "get", damaged)
    whole, broken = (await get(site, "s/tree"))["data"]
    assert len(whole["turns"]) == 1
    assert (broken["session"]["id"], broken["turns"]) == ("t", None)
