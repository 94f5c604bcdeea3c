"""Which session the header X-Session-ID names: one that was made here, or is opted in to; else it is a hint."""

from __future__ import annotations

from typing import Any

import pytest
from http_context import HELLO, Call, Site, served
from line_kit import TOOL, Client, line_of, user

HEADER = {"X-Session-Id": "ses_1"}
OPTED = {**HEADER, "X-Session-Create": "true"}
TITLE: dict[str, Any] = {"messages": [{"role": "system", "content": "Write a title."}, user("one")]}


async def names(site: Site) -> list[str]:
    """The names of all sessions that are no lines."""
    listed = (await site.http.get("/v1/sessions")).json()["data"]
    return [session["id"] for session in listed if session["kind"] == "session"]


@served()
async def test_an_id_of_the_clients_own_is_a_hint_and_makes_no_session_of_its_name(site: Site) -> None:
    client = Client(site)
    client.headers = HEADER
    told = [line_of(await client.ask(user(text))) for text in ("one", "two")]
    assert [(one["outcome"], one["via"]) for one in told] == [("begun", "x-session-id"), ("continued", "x-session-id")]
    assert await names(site) == []


@pytest.mark.parametrize("first", ["turn", "title"])
@served()
async def test_two_calls_at_once_under_such_an_id_are_both_answered(site: Site, first: str) -> None:
    """As OpenCode asks for a title beside the first turn."""
    calls = {"turn": {"messages": [user("one")], "tools": [TOOL]}, "title": TITLE}
    site.engine.pause_after = 1
    running = Call.post(site.app, "/v1/chat/completions", {**calls.pop(first), "stream": True}, headers=HEADER)
    await running.until(lambda: b"content" in running.body)
    site.engine.pause_after = None
    ((_, other),) = calls.items()
    assert (await site.chat(**other, headers=HEADER)).status_code == 200
    site.engine.go.set()
    await running.finish()
    assert running.status == 200
    assert await names(site) == []


@pytest.mark.parametrize("id", ["a b", "x" * 600, "import", "../x"])
@served()
async def test_an_id_that_no_session_can_have_is_no_error(site: Site, id: str) -> None:
    assert (await site.chat(headers={"X-Session-Id": id})).status_code == 200
    assert await names(site) == []


@pytest.mark.parametrize("made", ["created", "stateful", "opted in"])
@served()
async def test_a_session_that_was_made_here_is_named_and_brought_in_line(site: Site, made: str) -> None:
    if made == "created":
        await site.http.post("/v1/sessions", json={"id": "ses_1"})
    elif made == "stateful":
        await site.chat(session_id="ses_1")
    else:
        assert (await site.chat(headers=OPTED)).headers["x-session-id"] == "ses_1"
    answer = await site.chat(messages=[user("Another history.")], headers=HEADER)
    assert (answer.headers["x-session-id"], answer.json()["session_id"]) == ("ses_1", "ses_1")
    logged = (await site.http.get("/v1/sessions/ses_1/messages")).json()["data"]
    assert [entry["content"] for entry in logged][:1] == ["Another history."]


@served({"one": "k1", "two": "k2"})
async def test_another_tenants_session_is_not_named(site: Site) -> None:
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("k1", "k2"))
    await site.chat(session_id="ses_1", headers=one)
    answer = await site.chat(messages=[user("Mine.")], headers={**HEADER, **two})
    assert (answer.status_code, answer.headers.get("x-session-id")) == (200, None)
    logged = (await site.http.get("/v1/sessions/ses_1/messages", headers=one)).json()["data"]
    assert logged[0]["content"] == HELLO[0]["content"]


@pytest.mark.parametrize("headers", [{**HEADER, "X-Session-Create": "yes"}, {"X-Session-Create": "true"}])
@served()
async def test_an_opt_in_that_says_nothing_is_refused(site: Site, headers: dict[str, str]) -> None:
    answer = await site.chat(headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_session_id")


@served()
async def test_two_sessions_that_were_made_here_are_not_both_named(site: Site) -> None:
    for id in ("a", "b"):
        await site.http.post("/v1/sessions", json={"id": id})
    both = [("X-Session-ID", "a"), ("X-Session-ID", "b")]
    assert (await site.chat(headers=both)).json()["error"]["code"] == "session_id_mismatch"
    mixed = await site.chat(headers=[("X-Session-ID", "a"), ("X-Session-ID", "theirs")])
    assert mixed.headers["x-session-id"] == "a"
