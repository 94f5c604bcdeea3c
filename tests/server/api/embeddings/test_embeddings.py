"""``/v1/embeddings`` over a fake engine: shapes, prompts, cut inputs, refusals, what is counted."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_engine import EMBEDDING, FACTS, SCORING, vector_of
from http_context import Call, Site, demo_tokens, served, site, until, within
from msgspec import structs

from scheduler.pooling_messages import PoolInput
from scheduler.protocol import pack_ids, unpack_ids
from server.api.embeddings.pooling_call import Vectors
from server.engine.engine import EngineDied, EngineUnavailable, TurnRefused
from server.middleware.key_file import KeyFile, new_key, write_keys

KEYS = {"ann": "key-a"}


async def embed(site: Site, given: Any, **more: Any) -> httpx.Response:
    return await site.http.post("/v1/embeddings", json={"input": given, **more})


def want(text: str) -> list[float]:
    return vector_of(PoolInput(pack_ids(demo_tokens().encode(text, special=True))), 8)


def rows(answer: Any) -> Vectors:
    return np.array([one["embedding"] for one in answer["data"]], "<f4")


@asynccontextmanager
async def embedding() -> AsyncIterator[Site]:
    """A site whose model embeds."""
    async with site() as made:
        made.engine.facts = EMBEDDING
        yield made


embeds = within(embedding)


@embeds
async def test_a_text_a_list_and_ids_give_the_same(site: Site) -> None:
    ids = demo_tokens().encode("Hello", special=True)
    for given, count in (("Hello", 1), (["Hello", "Bye"], 2), (ids, 1), ([ids, ids], 2)):
        answer = (await embed(site, given, model="demo", user="u")).json()
        assert answer["object"] == "list"
        assert answer["model"] == "demo"
        assert [(one["object"], one["index"]) for one in answer["data"]] == [("embedding", n) for n in range(count)]
        assert np.allclose(rows(answer)[0], want("Hello"))
        assert "truncated" not in answer
    total = sum(len(demo_tokens().encode(text, special=True)) for text in ("Hello", "Bye"))
    assert (await embed(site, ["Hello", "Bye"])).json()["usage"] == {"prompt_tokens": total, "total_tokens": total}


@embeds
async def test_base64_is_the_bytes_of_the_numbers(site: Site) -> None:
    answer = (await embed(site, "Hello", encoding_format="base64")).json()
    assert np.allclose(np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4"), want("Hello"))


@embeds
async def test_fewer_dimensions_are_the_first_ones_of_unit_length(site: Site) -> None:
    cut = np.array(want("Hello")[:3])
    assert np.allclose(rows((await embed(site, "Hello", dimensions=3)).json())[0], cut / np.linalg.norm(cut))
    assert EMBEDDING.pooling is not None
    site.engine.facts = structs.replace(EMBEDDING, pooling=structs.replace(EMBEDDING.pooling, normalised=False))
    assert np.allclose(rows((await embed(site, "Hello", dimensions=3)).json())[0], cut)
    site.engine.facts = structs.replace(EMBEDDING, pooling=structs.replace(EMBEDDING.pooling, dimensions=3))
    assert np.allclose(rows((await embed(site, "Hello")).json())[0], cut)  # as the checkpoint says it


@embeds
async def test_a_prompt_of_the_checkpoint_is_put_before_the_text(site: Site) -> None:
    for field in ("prompt_name", "input_type"):
        answer = (await embed(site, "Hello", **{field: "query"})).json()
        assert np.allclose(rows(answer)[0], want("q: Hello"))
    assert site.engine.pooled[-1][1][0].skip == len(demo_tokens().encode("q: ", special=True))
    assert EMBEDDING.pooling is not None
    site.engine.facts = structs.replace(EMBEDDING, pooling=structs.replace(EMBEDDING.pooling, default_prompt="query"))
    assert np.allclose(rows((await embed(site, "Hello")).json())[0], want("q: Hello"))
    assert np.allclose(rows((await embed(site, "Hello", prompt_name="document")).json())[0], want("Hello"))


@embeds
async def test_what_is_too_long_is_cut_and_told(site: Site) -> None:
    long = "word " * 60
    whole = len(demo_tokens().encode(long, special=True))
    answer = (await embed(site, ["Hello", long])).json()
    assert answer["truncated"] == [{"index": 1, "tokens": whole, "kept": 24}]
    assert [len(unpack_ids(one.ids)) for one in site.engine.pooled[-1][1]][1] == 24
    answer = (await embed(site, [[1] * 30, [2] * 9], truncate_prompt_tokens=10)).json()
    assert answer["truncated"] == [{"index": 0, "tokens": 30, "kept": 10}]
    assert (await embed(site, long, truncate_prompt_tokens=-1)).status_code == 200
    refused = await embed(site, long, truncate=False)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


BAD: list[tuple[str, dict[str, Any]]] = [
    ("input", {"input": []}),
    ("input", {"input": [[]]}),
    ("input", {"input": ["a", 1]}),
    ("input", {"input": [1, "a"]}),
    ("input", {"input": [1, -1]}),
    ("input", {"input": [1, 2**31]}),
    ("input", {"input": [True]}),
    ("input", {"input": [1024]}),
    ("input", {"input": [[1], [1.5]]}),
    ("input", {"input": {"text": "a"}}),
    ("input", {"input": ["a"] * 2049}),
    ("input", {"input": ""}),
    ("input", {}),
    ("dimensions", {"input": "a", "dimensions": 0}),
    ("dimensions", {"input": "a", "dimensions": 9}),
    ("encoding_format", {"input": "a", "encoding_format": "int8"}),
    ("prompt_name", {"input": "a", "prompt_name": "passage"}),
    ("input_type", {"input": "a", "input_type": "passage"}),
    ("input_type", {"input": "a", "input_type": "query", "prompt_name": "document"}),
    ("prompt_name", {"input": [1], "prompt_name": "query"}),
    ("truncate_prompt_tokens", {"input": "a", "truncate_prompt_tokens": 0}),
    ("truncate_prompt_tokens", {"input": "a", "truncate_prompt_tokens": -2}),
    ("truncation_side", {"input": "a", "truncation_side": "left"}),
    ("colour", {"input": "a", "colour": 1}),
]


@served()
async def test_bad_fields_are_named(site: Site) -> None:
    site.engine.facts = EMBEDDING
    for param, body in BAD:
        answer = await site.http.post("/v1/embeddings", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (body, answer.text)
    assert site.engine.pooled == []


@served()
async def test_a_model_that_does_something_else_is_refused_by_what_it_does(site: Site) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for facts, path, body in (
        (FACTS, "/v1/embeddings", {"input": "a"}),
        (FACTS, "/v1/rerank", {"query": "a", "documents": ["b"]}),
        (SCORING, "/v1/embeddings", {"input": "a"}),
        (EMBEDDING, "/v1/chat/completions", chat),
        (EMBEDDING, "/v1/completions", {"prompt": "a"}),
        (EMBEDDING, "/v1/responses", {"input": "a"}),
        (SCORING, "/v1/messages", {**chat, "max_tokens": 4, "model": "demo"}),
    ):
        site.engine.facts = facts
        answer = await site.http.post(path, json=body)
        assert answer.status_code == 400, (path, answer.text)
        assert "This model" in answer.text
    assert (site.engine.pooled, site.engine.submitted) == ([], [])


@embeds
async def test_it_is_counted_for_the_key_and_in_the_metrics(site: Site) -> None:
    await embed(site, ["Hello", "Bye"])
    tokens = sum(len(unpack_ids(one.ids)) for one in site.engine.pooled[0][1])
    total = (await site.http.get("/v1/usage")).json()["total"]
    assert (total["requests"], total["new_tokens"], total["generated_tokens"]) == (1, tokens, 0)
    shown = (await site.http.get("/metrics")).text
    assert f"warmturn_request_prompt_tokens_sum {float(tokens)}" in shown
    assert 'warmturn_requests_total{route="/v1/embeddings",status="200"} 1.0' in shown


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (TurnRefused("queue_full", "Too many requests are waiting; try again later.", 1), 429),
        (TurnRefused("engine_error", "The model failed on this request."), 500),
        (EngineUnavailable("The engine is restarting.", 3), 503),
        (EngineDied("The engine stopped."), 503),
    ],
)
@served()
async def test_what_the_engine_raises_is_told(site: Site, failure: Exception, status: int) -> None:
    site.engine.facts = EMBEDDING
    site.engine.call_failure = failure
    assert (await embed(site, "Hello")).status_code == status
    assert (await site.http.get("/v1/usage")).json()["total"]["requests"] == 0


@embeds
async def test_a_client_that_leaves_takes_its_request_along(site: Site) -> None:
    site.engine.pause_after = 0
    call = Call.post(site.app, "/v1/embeddings", {"input": "Hello"})
    await until(lambda: site.engine.pooled)
    await call.leave()
    assert site.engine.cancelled == ["pool"]


async def test_without_a_key_there_is_none() -> None:
    async with site(KEYS) as made:
        made.engine.facts = EMBEDDING
        assert (await embed(made, "Hello")).status_code == 401


async def test_limits_of_a_key_hold_for_embeddings_too(tmp_path: Path) -> None:
    few, entry = new_key("ann", 1, None)
    short, other = new_key("bob", None, 3)
    write_keys(tmp_path / "keys.json", [entry, other])
    async with site(key_file=KeyFile(tmp_path / "keys.json")) as made:
        made.engine.facts = EMBEDDING
        for key in (few, short):
            made.http.headers["authorization"] = f"Bearer {key}"
            assert (await embed(made, "Hello there, friend")).status_code == 200
            refused = await embed(made, "Hello")
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert int(refused.headers["retry-after"]) > 0
        assert len(made.engine.pooled) == 2
