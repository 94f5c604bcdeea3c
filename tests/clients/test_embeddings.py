"""Clients that embed, unmodified, against a real server: OpenAI's, LangChain's with a vector store, Ollama's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ollama
import pytest
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings
from openai import OpenAI
from server_process import ServerProcess

TEXTS = ["A cat sat on the mat.", "The sun is red.", "How far is the moon?"]
SAVE = "import sys; from pathlib import Path; from pooling_kit import save_embedder; save_embedder(Path(sys.argv[1]))"


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The model is made by the Python that has the server and its libraries."""
    folder = tmp_path_factory.mktemp("models") / "embedder"
    python = os.environ.get("SERVER_PYTHON", sys.executable)
    root = Path(__file__).parents[2]
    paths = os.pathsep.join((str(root), str(root / "tests")))
    subprocess.run((python, "-c", SAVE, str(folder)), env={**os.environ, "PYTHONPATH": paths}, check=True)
    with ServerProcess(folder, tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture(scope="module")
def vectors(embedder: ServerProcess) -> list[list[float]]:
    """Of the texts, as OpenAI's client gets them."""
    client = OpenAI(base_url=f"{embedder.url}/v1", api_key="none")
    return [one.embedding for one in client.embeddings.create(model="m", input=TEXTS).data]


def test_langchain_fills_and_searches_a_vector_store(embedder: ServerProcess, vectors: list[list[float]]) -> None:
    embeddings = OpenAIEmbeddings(
        model="m", base_url=f"{embedder.url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    assert embeddings.embed_documents(TEXTS) == [pytest.approx(vector, abs=1e-5) for vector in vectors]
    store = InMemoryVectorStore.from_texts(TEXTS, embeddings)
    ((found, score),) = store.similarity_search_with_score(TEXTS[1], k=1)
    assert (found.page_content, score) == (TEXTS[1], pytest.approx(1.0, abs=1e-5))


def test_ollamas_client_gets_the_same(embedder: ServerProcess, vectors: list[list[float]]) -> None:
    client = ollama.Client(embedder.url)
    assert client.show("m").capabilities == ["embedding"]
    assert list(client.embed("m", TEXTS).embeddings) == [pytest.approx(vector, abs=1e-5) for vector in vectors]
    assert list(client.embeddings("m", TEXTS[0]).embedding) == pytest.approx(vectors[0], abs=1e-5)
