"""Stored chats: what ``store: true`` kept can be listed, fetched, changed and deleted, by OpenAI's client too."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from http_context import HELLO, HOST, Site, events, served
from log_kit import Where, opened, turn, with_log

from server.log.chat_rows import parse_chat_id, row_of
from server.log.response_rows import TurnExtras
from server.log.session_log import SessionLog
from server.log.tables import FORMAT

CHATS = "/v1/chat/completions"
KEYS = {"ann": "key-a", "bob": "key-b"}


async def store(site: Site, **body: Any) -> Any:
    answer = await site.chat(store=True, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def listed(site: Site, **params: Any) -> Any:
    answer = await site.http.get(CHATS, params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


@served()
async def test_a_stored_chat_is_fetched_as_it_was_answered(site: Site) -> None:
    made = await store(site, temperature=0.5, seed=7, user="u", metadata={"topic": "rome"})
    kept = (await site.http.get(f"{CHATS}/{made['id']}")).json()
    assert {name: kept[name] for name in made} == made
    assert (kept["temperature"], kept["seed"], kept["input_user"], kept["tools"]) == (0.5, 7, "u", None)
    assert kept["metadata"] == {"topic": "rome"}
    assert kept["object"] == "chat.completion"
    openai.types.chat.ChatCompletion.model_validate(kept)
    await site.chat(session_id="s")
    assert [chat["id"] for chat in (await listed(site))["data"]] == [made["id"]]


@served()
async def test_a_streamed_chat_is_stored_too(site: Site) -> None:
    chunks = events((await site.chat(store=True, stream=True)).text)
    kept = (await site.http.get(f"{CHATS}/{chunks[0]['id']}")).json()
    assert kept["choices"][0]["message"]["content"] == "Hello there, friend."
    assert kept["usage"]["completion_tokens"] > 1


@served()
async def test_its_messages_are_those_that_were_sent(site: Site) -> None:
    first = await store(site, messages=[{"role": "system", "content": "Be brief."}, *HELLO])
    second = await store(site, session_id=first["session_id"], messages=[{"role": "user", "content": "And you?"}])
    told = (await site.http.get(f"{CHATS}/{first['id']}/messages")).json()
    assert [(m["role"], m["content"]) for m in told["data"]] == [("system", "Be brief."), ("user", "Hello")]
    assert [m["id"] for m in told["data"]] == [f"{first['id']}-0", f"{first['id']}-1"]
    assert (told["object"], told["first_id"], told["has_more"]) == ("list", f"{first['id']}-0", False)
    page: dict[str, Any] = {"limit": 1, "order": "desc"}
    told = (await site.http.get(f"{CHATS}/{first['id']}/messages", params=page)).json()
    assert ([m["content"] for m in told["data"]], told["has_more"]) == (["Hello"], True)
    told = (await site.http.get(f"{CHATS}/{first['id']}/messages", params={**page, "after": told["last_id"]})).json()
    assert ([m["content"] for m in told["data"]], told["has_more"]) == (["Be brief."], False)
    assert (await site.http.get(f"{CHATS}/{first['id']}/messages?after=x")).status_code == 404
    assert [m["content"] for m in (await messages(site, second["id"]))] == ["And you?"]
    again = await site.http.post(f"/v1/sessions/{first['session_id']}/regenerate", json={"store": True})
    assert [m["content"] for m in (await messages(site, again.json()["id"]))] == ["And you?"]


async def messages(site: Site, id: str) -> Any:
    return (await site.http.get(f"{CHATS}/{id}/messages")).json()["data"]


@served()
async def test_pages_orders_and_filters(site: Site) -> None:
    made = []
    for number in range(5):
        metadata = {"half": str(number % 2), "all": "yes"}
        made.append((await store(site, session_id="s" if number > 2 else f"s{number}", metadata=metadata))["id"])
    assert [chat["id"] for chat in (await listed(site))["data"]] == made
    assert [chat["id"] for chat in (await listed(site, order="desc"))["data"]] == made[::-1]
    page = await listed(site, limit=2)
    assert ([chat["id"] for chat in page["data"]], page["has_more"]) == (made[:2], True)
    assert (page["first_id"], page["last_id"]) == (made[0], made[1])
    page = await listed(site, limit=3, after=made[1])
    assert ([chat["id"] for chat in page["data"]], page["has_more"]) == (made[2:], False)
    odd = await listed(site, **{"metadata[half]": "1", "metadata[all]": "yes"})
    assert [chat["id"] for chat in odd["data"]] == [made[1], made[3]]
    page = await listed(site, limit=1, model="demo", order="desc", **{"metadata[half]": "1"})
    assert ([chat["id"] for chat in page["data"]], page["has_more"]) == ([made[3]], True)
    nothing: dict[str, Any] = {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert await listed(site, model="other") == nothing
    assert await listed(site, **{"metadata[half]": "2"}) == nothing


@pytest.mark.parametrize(
    ("params", "status", "param"),
    [
        ({"limit": "0"}, 400, "limit"),
        ({"limit": "101"}, 400, "limit"),
        ({"order": "up"}, 400, "order"),
        ({"colour": "red"}, 400, "colour"),
        ({"metadata": "x"}, 400, "metadata"),
        ({"after": "chatcmpl-s-000000000000000000000000"}, 404, "after"),
        ({"after": "nonsense"}, 404, "after"),
    ],
)
@served()
async def test_what_cannot_be_listed(site: Site, params: dict[str, str], status: int, param: str) -> None:
    answer = await site.http.get(CHATS, params=params)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@served()
async def test_metadata_are_changed_and_nothing_else(site: Site) -> None:
    made = await store(site, metadata={"a": "1"})
    changed = await site.http.post(f"{CHATS}/{made['id']}", json={"metadata": {"b": "2"}})
    assert changed.json()["metadata"] == {"b": "2"}
    kept = (await site.http.get(f"{CHATS}/{made['id']}")).json()
    assert kept == changed.json()
    assert kept["choices"] == made["choices"]
    assert (await site.http.get(f"/v1/sessions/{made['session_id']}")).json()["metadata"] == {"a": "1"}
    cleared = await site.http.post(f"{CHATS}/{made['id']}", json={"metadata": None})
    assert cleared.json()["metadata"] == {}
    for body in ({}, {"metadata": {"a": 1}}, {"metadata": {}, "model": "x"}):
        assert (await site.http.post(f"{CHATS}/{made['id']}", json=body)).status_code == 400


@served()
async def test_what_is_deleted_is_gone_with_the_session_that_it_began(site: Site) -> None:
    alone, followed, named = await store(site), await store(site), await store(site, session_id="mine")
    await site.chat(session_id=followed["session_id"])
    for made, stays in ((alone, False), (followed, True), (named, True)):
        gone = await site.http.delete(f"{CHATS}/{made['id']}")
        assert gone.json() == {"object": "chat.completion.deleted", "id": made["id"], "deleted": True}
        for answer in (
            await site.http.delete(f"{CHATS}/{made['id']}"),
            await site.http.get(f"{CHATS}/{made['id']}"),
            await site.http.get(f"{CHATS}/{made['id']}/messages"),
            await site.http.post(f"{CHATS}/{made['id']}", json={"metadata": {}}),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "chat_completion_not_found")
        there = await site.http.get(f"/v1/sessions/{made['session_id']}")
        assert (there.status_code == 200) is stays
    assert ("default", alone["session_id"]) in site.engine.forgotten


@served()
async def test_a_deleted_session_takes_them_along(site: Site) -> None:
    made = await store(site, session_id="s")
    await site.http.delete("/v1/sessions/s")
    assert (await site.http.get(f"{CHATS}/{made['id']}")).status_code == 404
    assert (await listed(site))["data"] == []


@served(KEYS)
async def test_no_tenant_sees_anothers(site: Site) -> None:
    ann, bob = ({"Authorization": f"Bearer {key}"} for key in KEYS.values())
    made = (await site.chat(store=True, session_id="s", headers=ann)).json()
    await site.chat(store=True, session_id="s", headers=bob)
    path = f"{CHATS}/{made['id']}"
    assert (await site.http.get(path, headers=ann)).status_code == 200
    for answer in (
        await site.http.get(path, headers=bob),
        await site.http.get(f"{path}/messages", headers=bob),
        await site.http.post(path, json={"metadata": {"x": "y"}}, headers=bob),
        await site.http.delete(path, headers=bob),
        await site.http.get(CHATS, params={"after": made["id"]}, headers=bob),
    ):
        assert answer.status_code == 404
    for key in (ann, bob):
        assert len((await site.http.get(CHATS, headers=key)).json()["data"]) == 1


@served()
async def test_no_chat_is_a_response_and_no_response_a_chat(site: Site) -> None:
    made = await store(site, session_id="s")
    key = made["id"].rpartition("-")[2]
    response = (await site.http.post("/v1/responses", json={"input": "Hello"})).json()
    for id in (f"resp_s_{key}", f"resp_s_chat{key}", f"resp_s_chat-{key}"):
        assert (await site.http.get(f"/v1/responses/{id}")).status_code == 404
    for id in (f"chatcmpl-{response['id'].removeprefix('resp_').replace('_', '-')}", response["id"], "chatcmpl-1", "x"):
        assert (await site.http.get(f"{CHATS}/{id}")).status_code == 404
    assert len((await listed(site))["data"]) == 1


@served()
async def test_a_retry_has_the_id_of_what_was_stored(site: Site) -> None:
    first, again = [await site.chat(store=True, session_id="s", headers={"Idempotency-Key": "k"}) for _ in range(2)]
    assert again.headers["idempotent-replayed"] == "true"
    assert again.json()["id"] == first.json()["id"]
    assert len((await listed(site))["data"]) == 1


@served()
async def test_a_turn_that_is_not_committed_stores_nothing(site: Site) -> None:
    site.engine.ends_badly = Exception("it broke")
    assert (await site.chat(store=True)).status_code == 500
    assert (await listed(site))["data"] == []


@served()
async def test_the_official_client(site: Site) -> None:
    transport: Any = httpx2.ASGITransport(site.app)
    http = httpx2.AsyncClient(transport=transport)
    async with openai.AsyncOpenAI(base_url=f"http://{HOST}/v1", api_key="none", http_client=http) as ai:
        chats = ai.chat.completions
        for number in range(3):
            await chats.create(
                model="demo",
                messages=[{"role": "user", "content": f"Hello {number}"}],
                store=True,
                metadata={"number": str(number)},
            )
        found = [chat async for chat in chats.list(limit=1)]
        assert [chat.metadata for chat in found] == [{"number": str(number)} for number in range(3)]
        assert [chat.id async for chat in chats.list(metadata={"number": "1"}, model="demo")] == [found[1].id]
        assert (await chats.retrieve(found[0].id)).choices[0].message.content == "Hello there, friend."
        assert [message.content async for message in chats.messages.list(found[2].id)] == ["Hello 2"]
        updated = await chats.update(found[0].id, metadata={"x": "y"})
        assert updated.metadata == {"x": "y"}
        assert (await chats.delete(found[0].id)).deleted
        with pytest.raises(openai.NotFoundError):
            await chats.retrieve(found[0].id)


# --- in the log -----------------------------------------------------------------------------------------------

BODY = {"id": f"chatcmpl-s-{'0' * 24}", "created": 5, "model": "demo", "metadata": {"ü": "\u0000"}, "choices": []}
MESSAGES = [{"role": "user", "content": "ü"}]


def beside(id: str, created: int = 5, **fields: Any) -> TurnExtras:
    return TurnExtras(row_of({**BODY, "id": id, "created": created, **fields}, MESSAGES))


def test_they_survive_a_restart(where: Where) -> None:
    async def before(log: SessionLog) -> None:
        await turn(log, "s", "a", "b", extras=beside(BODY["id"]))  # type: ignore[arg-type]

    async def after(log: SessionLog) -> None:
        kept = await log.chats.get("a", str(BODY["id"]))
        assert kept is not None
        assert (kept.body, kept.messages) == (BODY, MESSAGES)
        assert await log.chats.get("b", str(BODY["id"])) is None
        changed = await log.chats.update("a", str(BODY["id"]), {"k": "v"})
        assert changed is not None
        assert await log.chats.update("b", str(BODY["id"]), {}) is None

    async def last(log: SessionLog) -> None:
        page = await log.chats.page("a", limit=9, after=None, descending=False, model=None, metadata={"k": "v"})
        assert page is not None
        assert ([chat.body["metadata"] for chat in page[0]], page[1]) == ([{"k": "v"}], False)
        assert await log.chats.delete("b", str(BODY["id"])) is None
        assert await log.chats.delete("a", str(BODY["id"])) == 0
        assert await log.chats.delete("a", str(BODY["id"])) is None

    for scenario in (before, after, last):
        with_log(where, scenario)


async def test_a_filter_looks_through_all_of_them(log: SessionLog) -> None:
    """More than are looked at in one transaction, in one second, of two sessions."""
    ids = [f"chatcmpl-{'st'[number % 2]}-{number:024x}" for number in range(230)]
    for number, id in enumerate(ids):
        wanted = {"wanted": "yes"} if number in (3, 120, 228, 229) else {}
        await turn(log, "st"[number % 2], "a", "b", extras=beside(id, number // 2, metadata=wanted))
    for descending in (False, True):
        order = [ids[number] for number in (3, 120, 228, 229)][:: -1 if descending else 1]
        got, after = [], None
        while True:
            page = await log.chats.page(
                "a", limit=1, after=after, descending=descending, model="demo", metadata={"wanted": "yes"}
            )
            assert page is not None
            got += [after := chat.body["id"] for chat in page[0]]
            if not page[1]:
                break
        assert got == order


async def test_one_that_is_damaged_is_left_out(tmp_path: Path) -> None:
    path, id = tmp_path / "log.sqlite", str(BODY["id"])
    async with opened(path) as log:
        await turn(log, "s", "a", "b", extras=beside(id))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE responses SET body = '{}'")
    async with opened(path) as log:
        assert await log.chats.get("a", id) is None
        assert await log.chats.page("a", limit=9, after=None, descending=False, model=None, metadata={}) == ([], False)


def test_a_log_of_format_5_gets_its_index(tmp_path: Path) -> None:
    path, id = tmp_path / "log.sqlite", str(BODY["id"])
    with_log(path, lambda log: turn(log, "s", "a", "b"))
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP INDEX responses_chats")
        connection.execute("UPDATE log_format SET version = 5")
    with_log(path, lambda log: turn(log, "s", "c", "d", extras=beside(id)))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT version FROM log_format").fetchone() == (FORMAT,)
        plan = connection.execute(
            "EXPLAIN QUERY PLAN SELECT * FROM responses WHERE substr(key, 1, 5) = 'chat-' ORDER BY created LIMIT 1"
        ).fetchall()
        assert "responses_chats" in str(plan)


def test_ids() -> None:
    assert parse_chat_id(f"chatcmpl-a-b-{'0' * 24}") == ("a-b", f"chat-{'0' * 24}")
    for id in (
        "",
        "chatcmpl-",
        f"chatcmpl-{'0' * 24}",
        f"chatcmpl-a-{'0' * 23}",
        f"chatcmpl-a-{'g' * 24}",
        "chatcmpl-a-b",
    ):
        assert parse_chat_id(id) is None
