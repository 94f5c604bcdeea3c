"""An embedding model, a cross-encoder and a model that chats, served together as users start them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from openai import OpenAI
from pooling_kit import TEXTS, body_of, hidden_of, pooling_tokenizer, save_cross_encoder, save_embedder
from server_process import ServerProcess, until
from tiny_models import save_model
from torch.nn.functional import normalize
from transformers import AutoModelForSequenceClassification

pytestmark = pytest.mark.wide

NEAR = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    save_embedder(made / "embedder", said={"prompts": {"query": "query: "}})
    save_cross_encoder(made / "ranker")
    save_model("llama", made)
    return made


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    also = [flag for name in ("ranker", "llama") for flag in ("--also", str(folder / name))]
    flags = ("--dtype", "float32", "--kv-memory", "1M", "--max-models", "3")
    with ServerProcess(folder / "embedder", tmp_path_factory.mktemp("data"), *also, *flags) as started:
        yield started


def want(text: str) -> Any:
    """The vector of a text, from scratch."""
    hidden = hidden_of(body_of(False), pooling_tokenizer().encode(text))
    return normalize(hidden.mean(dim=0), dim=0).numpy()


def test_openais_client_gets_the_vectors_of_each_text_alone(server: ServerProcess) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    found = client.embeddings.create(model="m", input=TEXTS)
    assert np.abs(np.array([one.embedding for one in found.data]) - [want(text) for text in TEXTS]).max() < NEAR
    assert found.usage.total_tokens == sum(len(pooling_tokenizer().encode(text)) for text in TEXTS)
    asked = client.embeddings.create(model="text-embedding-3-small", input="Sun", extra_body={"prompt_name": "query"})
    assert np.abs(np.array(asked.data[0].embedding) - want("query: Sun")).max() < NEAR


def test_many_requests_at_once_get_their_own(server: ServerProcess) -> None:
    texts = [f"{number} {text}"[:40] for number in range(8) for text in TEXTS]

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            return await asyncio.gather(*(client.post("/v1/embeddings", json={"input": text}) for text in texts))

    got = [answer.json()["data"][0]["embedding"] for answer in asyncio.run(ask())]
    assert np.abs(np.array(got) - [want(text) for text in texts]).max() < NEAR
    until(lambda: server.metric("warmturn_pooled_inputs_total", model="m") >= len(texts))  # told once a second


def test_documents_are_ranked_as_the_cross_encoder_scores_them(server: ServerProcess, folder: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder / "ranker").eval()
    query, documents = "A cat?", ["Sun", "The cat sat.", "ab" * 40]
    answer = server.answer("/v1/rerank", {"query": query, "documents": documents})
    for one in answer["results"]:
        made = pooling_tokenizer()(query, documents[one["index"]], truncation="longest_first", max_length=48)
        with torch.inference_mode():
            (score,) = torch.sigmoid(model(**{key: torch.tensor([ids]) for key, ids in made.items()}).logits)
        assert abs(float(score) - one["relevance_score"]) < NEAR
    assert answer["model"] == "ranker"


def test_each_model_does_its_own_work_only(server: ServerProcess) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    assert server.post("/v1/chat/completions", chat).json()["model"] == "llama"  # whatever comes first
    assert server.post("/v1/chat/completions", {**chat, "model": "m"}).status_code == 400
    assert server.post("/v1/embeddings", {"model": "llama", "input": "x"}).status_code == 400
    assert server.post("/v1/models/m/unload", {}).status_code == 200
    assert server.post("/v1/embeddings", {"input": "x"}).json()["model"] == "m"


def test_sessions_are_those_of_the_model_that_chats(server: ServerProcess) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    assert server.post("/v1/sessions/s/chat/completions", chat).status_code == 200
    assert httpx.get(f"{server.url}/v1/sessions/s").json()["object"] == "session"
    assert httpx.delete(f"{server.url}/v1/sessions/s").status_code in (200, 204)
