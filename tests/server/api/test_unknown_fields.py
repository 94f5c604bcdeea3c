"""Unknown fields: refused by name, or with --unknown-fields ignore left out and named in the receipt."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from http_context import HELLO, Site, events, served

from server.config.command_line import parse
from server.config.serve_options import ServeConfig

STRANGE: dict[str, Any] = {"colour": "red", "stream_options": {"include_usage": True, "shade": 1}, "stream": True}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{**HELLO[0], "mood": "good"}]}),
    ("/v1/completions", {"prompt": "Once"}),
    ("/v1/responses", {"input": "Hello"}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 8}),
    ("/v1/sessions/s/chat/completions", {"messages": HELLO}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
@served()
async def test_they_are_refused_by_name_by_default(site: Site, path: str, body: dict[str, Any]) -> None:
    answer = await site.http.post(path, json={"colour": "red", **body})
    assert answer.status_code == 400
    assert "colour" in answer.text or "mood" in answer.text
    assert not site.engine.submitted


@pytest.mark.parametrize(("path", "body"), BODIES)
@served(ignore_unknown=True)
async def test_they_are_left_out_and_named_in_the_receipt(site: Site, path: str, body: dict[str, Any]) -> None:
    answer = await site.http.post(path, json={"colour": "red", "not a name": 1, **body})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    receipt = told["cache"]
    assert sorted(receipt["ignored"]) == (["colour", "mood"] if "mood" in str(body) else ["colour"])
    again = await site.http.post(path, json={**body, **({"messages": HELLO} if "messages" in body else {})})
    assert "ignored" not in again.json()["cache"]


@served(ignore_unknown=True)
async def test_streams_tell_them_too(site: Site) -> None:
    told = events((await site.chat(**STRANGE)).text)
    receipts = [chunk["cache"] for chunk in told[:-1] if chunk.get("cache")]
    assert receipts
    assert all(sorted(receipt["ignored"]) == ["colour", "shade"] for receipt in receipts)


@served(ignore_unknown=True)
async def test_what_is_known_is_honoured_or_refused_as_ever(site: Site) -> None:
    for wrong in ({"temperature": 9}, {"temprature": 1, "top_p": "x"}, {"audio": {"voice": "x"}}, {"n": 0}):
        assert (await site.chat(**wrong)).status_code == 400
    assert (await site.http.get("/v1/sessions", params={"colour": "red"})).status_code == 400


@served(ignore_unknown=True)
async def test_other_requests_say_so_in_the_log(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "warmturn.http"):
        assert (await site.http.post("/v1/sessions", json={"id": "s", "colour": "red"})).status_code == 201
    assert [record.getMessage() for record in caplog.records if "left out" in record.getMessage()] == [
        "unknown fields were left out: colour"
    ]


@served(ignore_unknown=True)
async def test_at_most_so_many_are_named(site: Site) -> None:
    strange: dict[str, Any] = {f"field_{number}": number for number in range(100)}
    answer = await site.chat(**strange)
    assert len(answer.json()["cache"]["ignored"]) == 32


def test_the_flag() -> None:
    given = parse(["serve", "--unknown-fields", "ignore"])
    assert isinstance(given, ServeConfig)
    assert (given.unknown_fields, ServeConfig().unknown_fields) == ("ignore", "refuse")
