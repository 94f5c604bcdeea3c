"""Searching over HTTP: sessions with their hits, for their tenant only, and bad queries."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from fake_engine import EMBEDDING, vector_of
from http_context import Site, served, site
from log_kit import Where
from msgspec import structs

from server.api.sessions import similar_routes

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
    model = (await site.http.get("/v1/models")).json()["data"][0]["id"]
    assert [found["id"] for found in await listed(site, f"query=friend&model={model}")] == ["s"]
    assert await listed(site, "query=friend&model=other") == []


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


@asynccontextmanager
async def with_embedder(where: Where | None = None) -> Any:
    """A site of two tenants whose model embeds, and their sessions; texts are alike that begin alike."""
    async with site(KEYS, database=where if isinstance(where, str) else None) as made:
        for tenant in KEYS:
            for name, text in (("moon", "The moon is far."), ("cat", "A cat sat on it."), ("nothing", " ")):
                await create(made, name, text, as_user(tenant))
        made.engine.facts = EMBEDDING
        yield made


async def similar(site: Site, query: str, user: str = "ann") -> Any:
    answer = await site.http.get("/v1/similar_sessions", params={"query": query}, headers=as_user(user))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_sessions_are_found_by_meaning(where: Where) -> None:
    """Vectors are made once, kept in the log for their tenant, made anew after a turn and for another model, and
    deleted with the session."""
    async with with_embedder(where) as made:
        found = await similar(made, "The moon is far.")
        assert (found["model"], found["pending"]) == ("demo", False)
        assert {one["session"]["id"] for one in found["data"]} == {"moon", "cat"}
        query, *rows = (np.array(vector_of(one, 8)) for one in made.engine.pooled[-1][1])
        scores = {"cat": query @ rows[0], "moon": query @ rows[1]}  # the one used last is made first
        best = sorted(scores, key=lambda name: -scores[name])
        assert [one["session"]["id"] for one in found["data"]] == best
        assert [one["score"] for one in found["data"]] == pytest.approx([scores[name] for name in best], abs=1e-5)
        assert [(tenant, len(inputs)) for tenant, inputs in made.engine.pooled] == [("ann", 3)]
        await similar(made, "A cat sat on it.")
        assert len(made.engine.pooled[-1][1]) == 1  # the query alone
        assert await made.log.vectors.of("bob", EMBEDDING.fingerprint) == []
        edited = {"content": "The sun is far."}
        await made.http.put("/v1/sessions/moon/messages/0", json=edited, headers=as_user("ann"))
        await similar(made, "sun")
        assert len(made.engine.pooled[-1][1]) == 2
        await made.http.delete("/v1/sessions/cat", headers=as_user("ann"))
        assert [one["session"]["id"] for one in (await similar(made, "cat"))["data"]] == ["moon"]
        made.engine.facts = structs.replace(EMBEDDING, fingerprint="another")
        await similar(made, "sun")
        assert len(made.engine.pooled[-1][1]) == 2
        assert await made.log.vectors.of("ann", EMBEDDING.fingerprint) == []
        used = await made.http.get("/v1/usage", headers=as_user("bob"))
        assert used.json()["data"] == []


async def test_what_one_search_embeds_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similar_routes, "BUDGET", 1)
    async with with_embedder() as made:
        assert [(await similar(made, "moon"))["pending"] for _ in range(4)] == [True, True, False, False]
        assert [len(inputs) for _, inputs in made.engine.pooled] == [1, 2, 2, 1]  # the newest said nothing


@served()
async def test_without_an_embedding_model_nothing_is_found_by_meaning(site: Site) -> None:
    await create(site, "s", "hello")
    found = (await site.http.get("/v1/similar_sessions?query=hello")).json()
    assert (found["data"], found["model"], found["pending"]) == ([], None, False)
    assert (await site.http.get("/v1/similar_sessions?query=+")).status_code == 400
    assert (await site.http.get("/v1/similar_sessions")).status_code == 400
