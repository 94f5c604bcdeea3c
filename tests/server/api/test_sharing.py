"""Links to branches: what they show to those who have no key, and what ends them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from http_context import HELLO, Site, served
from http_context import site as made_site
from log_kit import as_format_9, opened, sqlite, turn
from postgres_server import PostgresServer

from server.log.share_rows import MOST, Share, digest_of
from server.log.tables import FORMAT

KEYS = {"ann": "key-a", "bob": "key-b"}
ANN, BOB = ({"authorization": f"Bearer {key}"} for key in KEYS.values())
MORE = [{"role": "user", "content": "And now?"}]


async def talked(site: Site, headers: Any = None) -> None:
    """A session of two turns."""
    for messages in (HELLO, MORE):
        answer = await site.chat(headers=headers, session_id="s", messages=messages)
        assert answer.status_code == 200, answer.text


async def shared(site: Site, headers: Any = None, **body: Any) -> dict[str, Any]:
    """A new link."""
    answer = await site.http.post("/v1/sessions/s/shares", json=body, headers=headers)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def shown(site: Site, secret: str) -> Any:
    """What a link shows; the status of an error."""
    answer = await site.http.get("/v1/shared", headers={"x-share-secret": secret})
    if answer.status_code == 200:
        assert answer.headers["cache-control"] == "no-store"
        return [message["content"] for message in answer.json()["messages"]]
    assert answer.json()["error"]["code"] == "share_not_found"
    return answer.status_code


@served(KEYS, sharing=True)
async def test_who_has_a_link_reads_that_branch_up_to_that_turn_and_nothing_else(site: Site) -> None:
    await talked(site, ANN)
    link = await shared(site, ANN, turn=1)
    said = await shown(site, link["secret"])
    assert (len(said), said[0]) == (2, "Hello")
    answer = await site.http.get("/v1/shared", headers={"x-share-secret": link["secret"]})
    assert answer.json()["title"] == "Hello"
    assert "s1" not in answer.text
    whole = await shared(site, ANN)
    assert (whole["turn"], len(await shown(site, whole["secret"]))) == (2, 4)
    for wrong in ("", "x", link["id"], link["secret"][:-1], "x" * 200):
        assert await shown(site, wrong) == 404
    assert (await site.http.get("/v1/sessions/s/messages")).status_code == 401
    assert (
        await site.http.get("/v1/sessions/s/messages", headers={"x-share-secret": link["secret"]})
    ).status_code == 401


@served(KEYS, sharing=True)
async def test_links_are_listed_and_revoked_by_their_tenant_alone(site: Site) -> None:
    await talked(site, ANN)
    links = [await shared(site, ANN), await shared(site, ANN, turn=1)]
    listed = (await site.http.get("/v1/sessions/s/shares", headers=ANN)).json()["data"]
    assert sorted(one["id"] for one in listed) == sorted(one["id"] for one in links)
    assert not any("secret" in one for one in listed)
    path = f"/v1/sessions/s/shares/{links[0]['id']}"
    for answer in (
        await site.http.get("/v1/sessions/s/shares", headers=BOB),
        await site.http.post("/v1/sessions/s/shares", json={}, headers=BOB),
        await site.http.delete(path, headers=BOB),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")
    assert (await site.http.delete(path, headers=ANN)).json()["deleted"]
    assert await shown(site, links[0]["secret"]) == 404
    assert len(await shown(site, links[1]["secret"])) == 2
    assert (await site.http.delete(path, headers=ANN)).status_code == 404


@served(sharing=True)
async def test_a_link_ends_with_its_session_its_turn_or_its_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    await talked(site)
    brief, first, last = await shared(site, expires_in_seconds=60), await shared(site, turn=1), await shared(site)
    now = time.time()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now + 61)
        assert await shown(site, brief["secret"]) == 404
        assert len(await shown(site, last["secret"])) == 4
        assert len((await site.http.get("/v1/sessions/s/shares")).json()["data"]) == 2
    await site.http.post("/v1/sessions/s/rewind", json={"turn": 1})
    assert await shown(site, last["secret"]) == 404
    assert len(await shown(site, first["secret"])) == 2
    await site.chat(session_id="s", messages=MORE)  # another turn in its place
    assert await shown(site, last["secret"]) == 404
    await site.http.delete("/v1/sessions/s")
    assert await shown(site, first["secret"]) == 404
    await talked(site)  # the name again
    assert await shown(site, first["secret"]) == 404


async def test_links_and_search_on_postgresql(postgres: PostgresServer) -> None:
    async with made_site(KEYS, sharing=True, database=postgres.new_database()) as site:
        await talked(site, ANN)
        first, last = await shared(site, ANN, turn=1), await shared(site, ANN)
        assert [len(await shown(site, link["secret"])) for link in (first, last)] == [2, 4]
        for query, headers, names in (("frien", ANN, ["s"]), ("hello", BOB, []), ("nightingale", ANN, [])):
            found = (await site.http.get("/v1/sessions", params={"query": query}, headers=headers)).json()["data"]
            assert [one["id"] for one in found] == names
        listed = (await site.http.get("/v1/sessions/s/shares", headers=ANN)).json()["data"]
        assert {one["id"] for one in listed} == {first["id"], last["id"]}
        path = f"/v1/sessions/s/shares/{first['id']}"
        assert (await site.http.delete(path, headers=BOB)).status_code == 404
        assert (await site.http.delete(path, headers=ANN)).status_code == 200
        assert await shown(site, first["secret"]) == 404
        await site.http.post("/v1/sessions/s/rewind", json={"turn": 1}, headers=ANN)
        assert await shown(site, last["secret"]) == 404
        again = await shared(site, ANN)
        await site.http.delete("/v1/sessions/s", headers=ANN)
        assert await shown(site, again["secret"]) == 404
        found = (await site.http.get("/v1/sessions", params={"query": "hello"}, headers=ANN)).json()["data"]
        assert found == []


@served(sharing=True)
async def test_what_cannot_be_shared_is_refused(site: Site) -> None:
    await talked(site)
    for body, param in (
        ({"turn": 3}, "turn"),
        ({"turn": 0}, "turn"),
        ({"expires_in_seconds": 59}, "expires_in_seconds"),
        ({"expires_in_seconds": 10**9}, "expires_in_seconds"),
        ({"key": "x"}, "key"),
    ):
        answer = await site.http.post("/v1/sessions/s/shares", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    await site.http.post("/v1/sessions", json={"id": "empty"})
    assert (await site.http.post("/v1/sessions/empty/shares", json={})).status_code == 400
    assert (await site.http.delete("/v1/sessions/s/shares/none")).status_code in (400, 404)
    for _ in range(MOST):
        await shared(site)
    answer = await site.http.post("/v1/sessions/s/shares", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_shares")


@served()
async def test_without_the_option_there_are_no_links(site: Site) -> None:
    await talked(site)
    assert (await site.http.post("/v1/sessions/s/shares", json={})).status_code == 404
    assert (await site.http.get("/v1/shared", headers={"x-share-secret": "x"})).status_code == 404


async def test_the_log_keeps_links_over_an_upgrade_and_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "log.sqlite"
    async with opened(path) as log:
        await turn(log, "s", "a", "b")
    as_format_9(path)
    now = int(time.time())
    async with opened(path) as log:
        await log.shares.add(Share(digest_of("secret"), "a", "s", 1, "turn_1", now, now + 60))
    assert sqlite(path, "SELECT version FROM log_format") == [(FORMAT,)]
    async with opened(path) as log:
        found = await log.shares.find("secret")
        assert found is not None
        assert (found.tenant, found.session, found.turn, found.mark) == ("a", "s", 1, "turn_1")
        await log.delete("a", "s")
        assert await log.shares.find("secret") is None
    assert sqlite(path, "SELECT * FROM shares") == []
    assert b"secret" not in path.read_bytes()
