"""Ollama's requests for embeddings."""

from __future__ import annotations

import numpy as np
from fake_engine import EMBEDDING, SCORING, vector_of
from http_context import Site, demo_tokens, served

from scheduler.pooling_messages import PoolInput
from scheduler.protocol import pack_ids


def want(text: str) -> list[float]:
    return vector_of(PoolInput(pack_ids(demo_tokens().encode(text, special=True))), 8)


@served()
async def test_one_text_and_several(site: Site) -> None:
    site.engine.facts = EMBEDDING
    options = {"model": "demo:latest", "keep_alive": "5m", "options": {"num_ctx": 2048}}
    one = (await site.http.post("/api/embed", json={**options, "input": "Hello"})).json()
    assert np.allclose(one["embeddings"], [want("Hello")])
    assert one["prompt_eval_count"] == len(demo_tokens().encode("Hello", special=True))
    assert {"model", "total_duration", "load_duration"} <= one.keys()
    two = (await site.http.post("/api/embed", json={**options, "input": ["Hello", "Bye"], "dimensions": 4})).json()
    assert [len(row) for row in two["embeddings"]] == [4, 4]
    old = (await site.http.post("/api/embeddings", json={**options, "prompt": "Hello"})).json()
    assert np.allclose(old["embedding"], want("Hello"))


@served()
async def test_what_is_wrong_is_told_in_ollamas_shape(site: Site) -> None:
    site.engine.facts = EMBEDDING
    bodies: list[dict[str, object]] = [
        {},
        {"input": []},
        {"input": "a", "dimensions": 9},
        {"input": "word " * 60, "truncate": False},
    ]
    for body in bodies:
        answer = await site.http.post("/api/embed", json=body)
        assert (answer.status_code, [*answer.json()]) == (400, ["error"]), body
    site.engine.facts = SCORING
    assert (await site.http.post("/api/embeddings", json={"prompt": "a"})).status_code == 400
    assert site.engine.pooled == []


@served()
async def test_the_model_says_that_it_embeds(site: Site) -> None:
    site.engine.facts = EMBEDDING
    shown = (await site.http.post("/api/show", json={"model": "demo"})).json()
    assert shown["capabilities"] == ["embedding"]
    assert shown["model_info"][f"{shown['model_info']['general.architecture']}.embedding_length"] == 8
