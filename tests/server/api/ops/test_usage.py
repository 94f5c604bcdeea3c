"""`GET /v1/usage`: what each key of the tenant has used, by day; and quotas of keys over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from http_context import HELLO, Site, events, served, site

from server.log import quota
from server.log.usage_rows import today
from server.middleware.key_file import KeyFile, new_key, write_keys


@asynccontextmanager
async def keyed(folder: Path, entries: list[Any]) -> AsyncIterator[tuple[Site, list[dict[str, str]]]]:
    """A site of these keys and a header for each."""
    write_keys(folder / "keys.json", [entry for _, entry in entries])
    async with site(key_file=KeyFile(folder / "keys.json")) as made:
        yield made, [{"authorization": f"Bearer {key}"} for key, _ in entries]


async def test_each_keys_usage_is_told_to_its_tenant_only(tmp_path: Path) -> None:
    entries = [new_key(tenant, None, None) for tenant in ("ann", "ann", "bob")]
    async with keyed(tmp_path, entries) as (made, keys):
        first = (await made.chat(headers=keys[0])).json()["usage"]
        again = (await made.chat(headers=keys[0], stream=True, stream_options={"include_usage": True})).text
        second = events(again)[-2]["usage"]
        await made.complete(headers=keys[1], max_tokens=2)
        answer = (await made.http.get("/v1/usage", headers=keys[1])).json()
        days = {day["key"]: day for day in answer["data"]}
        assert {*days} == {entry.id for _, entry in entries[:2]}
        assert {day["day"] for day in days.values()} == {today()}
        told = days[entries[0][1].id]
        reused = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (first, second)]
        assert reused[1] > 0
        assert told["requests"] == 2
        assert told["reused_tokens"] == sum(reused)
        assert told["new_tokens"] == first["prompt_tokens"] + second["prompt_tokens"] - sum(reused)
        assert told["generated_tokens"] == first["completion_tokens"] + second["completion_tokens"]
        assert 0 <= told["seconds"] < 60  # rounded: a made-up turn may take less than is told
        assert answer["total"]["requests"] == 3
        only = (await made.http.get(f"/v1/usage?key={entries[1][1].id}", headers=keys[0])).json()
        assert [day["key"] for day in only["data"]] == [entries[1][1].id]
        assert only["total"]["requests"] == 1
        theirs = (await made.http.get("/v1/usage", headers=keys[2])).json()
        assert theirs["data"] == []
        assert theirs["kept"] == {"sessions": 0, "bytes": 0, "max_sessions": None, "max_bytes": None}
        assert (await made.http.get("/v1/usage")).status_code == 401


@served()
async def test_days_are_chosen_and_without_keys_there_is_none(made: Site) -> None:
    await made.chat(session_id="s")
    answer = (await made.http.get(f"/v1/usage?from={today()}&to={today()}")).json()
    assert [day["key"] for day in answer["data"]] == [None]
    assert answer["kept"]["sessions"] == 1
    assert answer["kept"]["bytes"] > 100
    assert (answer["from"], answer["to"]) == (today(), today())
    assert (await made.http.get("/v1/usage?from=2020-01-01&to=2020-12-31")).json()["data"] == []


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("from=2026-02-30", "from"),
        ("from=0", "from"),
        ("to=today", "to"),
        ("from=2026-02-01&to=2026-01-31", "to"),
        ("from=2024-01-01&to=2026-01-31", "to"),
        ("key=CANARY", "key"),
        ("day=2026-01-01", "day"),
        ("to=0001-01-01&from=9999-12-31", "to"),
    ],
)
@served()
async def test_a_wrong_day_is_a_400(made: Site, given: str, param: str) -> None:
    answer = await made.http.get(f"/v1/usage?{given}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert "CANARY" not in answer.text
    assert (await made.http.get("/v1/usage?to=0001-01-01")).status_code == 200


async def test_a_key_begins_no_more_sessions_than_it_may_on_any_endpoint(tmp_path: Path) -> None:
    entries = [new_key("ann", None, None, max_sessions=1), new_key("ann", None, None), new_key("bob", None, None)]
    async with keyed(tmp_path, entries) as (made, keys):
        assert (await made.chat(headers=keys[0], session_id="one")).status_code == 200
        submitted = len(made.engine.submitted)
        for path, body in (
            ("/v1/chat/completions", {"messages": HELLO, "session_id": "two"}),
            ("/v1/chat/completions", {"messages": HELLO, "store": True}),
            ("/v1/sessions/two/chat/completions", {"messages": HELLO}),
            ("/v1/completions", {"prompt": "a", "session_id": "two"}),
            ("/v1/responses", {"input": "a"}),
            ("/v1/sessions", {"id": "two"}),
            ("/v1/sessions/one/fork", {}),
            ("/v1/conversations", {}),
        ):
            answer = await made.http.post(path, json=body, headers=keys[0])
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "insufficient_quota"), path
            assert answer.headers["x-should-retry"] == "false"
        assert len(made.engine.submitted) == submitted
        assert (await made.chat(headers=keys[0], session_id="one")).status_code == 200  # it is there
        assert (await made.chat(headers=keys[0])).status_code == 200  # nothing is kept
        line = {**keys[0], "x-claude-code-session-id": "0b5f6d3e-6d3b-4a62-9f4e-2f4f0a4f7f11"}
        assert (await made.chat(headers=line)).status_code == 200  # without a line
        assert [one["id"] for one in (await made.http.get("/v1/sessions", headers=keys[0])).json()["data"]] == ["one"]
        assert (await made.chat(headers=keys[1], session_id="two")).status_code == 200  # another key of the tenant
        assert (await made.chat(headers=keys[2], session_id="two")).status_code == 200  # another tenant
        kept = (await made.http.get("/v1/usage", headers=keys[0])).json()["kept"]
        assert (kept["sessions"], kept["max_sessions"]) == (2, 1)


async def test_a_tenant_with_all_the_bytes_of_a_key_adds_none_until_some_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "PATIENCE", 0)
    entries = [new_key("ann", None, None, max_bytes=100)]
    async with keyed(tmp_path, entries) as (made, keys):
        assert (await made.chat(headers=keys[0], session_id="one")).status_code == 200
        for body in ({"session_id": "one"}, {"session_id": "two"}):
            refused = await made.chat(headers=keys[0], **body)
            assert refused.json()["error"]["code"] == "insufficient_quota"
        assert (await made.chat(headers=keys[0])).status_code == 200
        assert (await made.http.delete("/v1/sessions/one", headers=keys[0])).status_code == 200
        assert (await made.chat(headers=keys[0], session_id="one")).status_code == 200
