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
from server.engine.engine import TurnRefused


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


@served()
async def test_a_model_that_generates_gives_its_last_state(site: Site) -> None:
    """From the session's KV, of unit length; the turn that computes it draws nothing, and nothing is stored."""
    await chat(site, "Hi")
    site.engine.facts = FACTS
    before = (await site.http.get("/v1/sessions/s")).json()
    answer = (await embed(site)).json()
    state = np.arange(1, 5) / np.linalg.norm(np.arange(1, 5))
    assert np.allclose(answer["embedding"], state)
    assert (answer["pooling"], answer["windows"], answer["model"]) == (["lasttoken"], 1, "demo")
    asked = site.engine.submitted[-1]
    assert (asked.session, asked.state, asked.stopping.max_tokens) == ("s", True, 0)
    assert answer["usage"]["total_tokens"] == len(asked.prompt) // 4 == before["tokens"]
    assert answer["cached_tokens"] == before["tokens"] - 1
    assert (await site.http.get("/v1/sessions/s")).json() == before
    assert np.allclose((await embed(site, dimensions=1)).json()["embedding"], [1])
    assert (await embed(site, dimensions=5)).json()["error"]["param"] == "dimensions"
    site.engine.facts = structs.replace(FACTS, vocab_size=FACTS.vocab_size + 1)
    assert (await embed(site)).json()["error"]["code"] == "session_of_another_model"
    site.engine.facts = FACTS
    await site.http.post("/v1/sessions", json={"id": "empty"})
    refused = await site.http.post("/v1/sessions/empty/embedding", json={})
    assert refused.json()["error"]["code"] == "empty_session"
    site.engine.refusal = TurnRefused("session_busy", "A turn of this session is running.")
    site.engine.refuse_from = 0
    assert (await embed(site)).status_code == 409
