"""Searching over HTTP: sessions with their hits, for their tenant only, and bad queries."""

from __future__ import annotations

from typing import Any

import pytest
from http_context import Site, served

KEYS = {"ann": "a-key-of-ann", "bob": "a-key-of-bob"}


def as_user(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


async def create(site: Site, id: str, text: str, headers: Any = None, **metadata: str) -> None:
    body = {"id": id, "messages": [{"role": "user", "content": text}], "metadata": metadata}
    assert (await site.http.post("/v1/sessions", json=body, headers=headers)).status_code == 201


async def listed(site: Site, query: str, headers: Any = None) -> list[Any]:
    answer = await site.http.get(f"/v1/sessions?{query}", headers=headers)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["data"])


@served()
async def test_sessions_are_listed_with_their_hits(site: Site) -> None:
    await create(site, "s", "Where is the nightingale?")
    await create(site, "t", "Nothing.")
    (session,) = await listed(site, "query=nightin")
    assert session["hits"] == [
        {"message": 0, "role": "user", "before": "Where is the ", "match": "nightingale", "after": "?"}
    ]
    assert (session["id"], session["title"]) == ("s", "Where is the nightingale?")
    assert [("hits" in other, other["title"]) for other in await listed(site, "")] == [
        (False, "Nothing."),
        (False, "Where is the nightingale?"),
    ]
    assert (await site.http.get("/v1/sessions/s")).json()["title"] == "Where is the nightingale?"


@served()
async def test_a_turn_is_found_at_once(site: Site) -> None:
    await site.chat("/v1/sessions/s/chat/completions")
    (session,) = await listed(site, "query=friend")
    assert [(hit["message"], hit["role"]) for hit in session["hits"]] == [(1, "assistant")]
    assert [found["id"] for found in await listed(site, f"query=friend&fingerprint={session['fingerprint']}")] == ["s"]
    assert await listed(site, "query=friend&fingerprint=other") == []


@served(KEYS)
async def test_a_tenant_finds_its_own(site: Site) -> None:
    await create(site, "s", "hello", as_user("ann"), **{"label:work": "yes"})
    assert len(await listed(site, "query=hello", as_user("ann"))) == 1
    assert await listed(site, "query=hello", as_user("bob")) == []
    keys = await site.http.get("/v1/metadata_keys?prefix=label:", headers=as_user("bob"))
    assert keys.json()["data"] == []


@served()
async def test_labels_are_keys_of_metadata(site: Site) -> None:
    await create(site, "s", "one", **{"label:work": "yes", "title": "One"})
    await create(site, "t", "two", **{"label:work": "yes", 'label:"quoted"': "yes"})
    answer = (await site.http.get("/v1/metadata_keys?prefix=label:")).json()
    assert answer["object"] == "list"
    assert [(found["key"], found["sessions"]) for found in answer["data"]] == [('label:"quoted"', 1), ("label:work", 2)]
    assert [found["key"] for found in (await site.http.get("/v1/metadata_keys")).json()["data"]][-1] == "title"
    assert [session["id"] for session in await listed(site, "metadata[label:work]=yes&query=two")] == ["t"]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("sessions?query=", "query"),
        ("sessions?query=%2A%20%22", "query"),
        (f"sessions?query={'a' * 201}", "query"),
        (f"sessions?fingerprint={'a' * 129}", "fingerprint"),
        (f"metadata_keys?prefix={'a' * 65}", "prefix"),
        ("metadata_keys?suffix=a", "suffix"),
    ],
)
@served()
async def test_bad_queries(site: Site, path: str, param: str) -> None:
    answer = await site.http.get(f"/v1/{path}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
