"""A session as one vector: what counts of it, windows of a long one, refusals."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
from fake_engine import EMBEDDING, FACTS, vector_of
from http_context import Site, demo_tokens, served
from msgspec import structs

from scheduler.pooling_messages import PoolInput
from scheduler.protocol import pack_ids


async def chat(site: Site, text: str) -> None:
    site.engine.facts = FACTS
    answer = await site.chat("/v1/sessions/s/chat/completions", messages=[{"role": "user", "content": text}])
    assert answer.status_code == 200
    site.engine.facts = EMBEDDING


async def embed(site: Site, **body: Any) -> httpx.Response:
    return await site.http.post("/v1/sessions/s/embedding", json=body)


def want(text: str) -> Any:
    return np.array(vector_of(PoolInput(pack_ids(demo_tokens().encode(text, special=True))), 8))


@served()
async def test_what_was_said_is_one_vector(site: Site) -> None:
    await chat(site, "Hi")
    answer = (await embed(site)).json()
    assert np.allclose(answer["embedding"], want("Hi\n\nHello there, friend."))
    assert (answer["object"], answer["session_id"], answer["windows"]) == ("session.embedding", "s", 1)
    coded = (await embed(site, encoding_format="base64", dimensions=3)).json()["embedding"]
    cut = want("Hi\n\nHello there, friend.")[:3]
    assert np.allclose(np.frombuffer(base64.b64decode(coded), "<f4"), cut / np.linalg.norm(cut))


@served()
async def test_a_long_one_is_read_in_windows_that_weigh_by_their_tokens(site: Site) -> None:
    await chat(site, "word " * 30)
    answer = (await embed(site)).json()
    inputs = site.engine.pooled[-1][1]
    assert answer["windows"] == len(inputs) > 2
    whole = sum(np.array(vector_of(one, 8)) * len(one.ids) for one in inputs)
    assert np.allclose(answer["embedding"], whole / np.linalg.norm(whole))
    assert answer["usage"]["total_tokens"] == sum(len(one.ids) // 4 for one in inputs)
    assert EMBEDDING.pooling is not None
    site.engine.facts = structs.replace(EMBEDDING, pooling=structs.replace(EMBEDDING.pooling, normalised=False))
    mean = whole / sum(len(one.ids) for one in inputs)
    assert np.allclose((await embed(site)).json()["embedding"], mean)


@served()
async def test_what_cannot_be_embedded(site: Site) -> None:
    site.engine.facts = EMBEDDING
    assert (await embed(site)).status_code == 404
    await site.http.post("/v1/sessions", json={"id": "s"})
    assert (await embed(site)).json()["error"]["code"] == "empty_session"
    await chat(site, "Hi")
    assert (await embed(site, dimensions=9)).json()["error"]["param"] == "dimensions"
    assert (await embed(site, encoding_format="x")).json()["error"]["param"] == "encoding_format"
    site.engine.facts = FACTS
    assert (await embed(site)).json()["error"]["code"] == "wrong_model_task"
