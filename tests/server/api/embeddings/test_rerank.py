"""``/v1/rerank`` and ``/v1/score`` over a fake engine, which scores a pair by the share of its second text."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
from fake_engine import EMBEDDING, SCORING, vector_of
from http_context import Site, demo_tokens, served
from msgspec import structs

from scheduler.model_facts import PoolingFacts
from scheduler.pooling_messages import PoolInput
from scheduler.protocol import pack_ids, unpack_ids

DOCUMENTS = ["Hello", "Hello there, my friend", "Hello you"]


async def post(site: Site, path: str, **body: Any) -> httpx.Response:
    return await site.http.post(path, json=body)


@served()
async def test_documents_come_back_best_first(site: Site) -> None:
    site.engine.facts = SCORING
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        answer = (await post(site, path, model="demo", query="Hi", documents=DOCUMENTS)).json()
        scores = [one["relevance_score"] for one in answer["results"]]
        assert answer["results"][0]["document"] == {"text": DOCUMENTS[answer["results"][0]["index"]]}
        assert scores == sorted(scores, reverse=True)
        assert sorted(one["index"] for one in answer["results"]) == [0, 1, 2]
        assert answer["usage"]["total_tokens"] == sum(len(unpack_ids(one.ids)) for one in site.engine.pooled[-1][1])


@served()
async def test_fewer_results_and_no_documents(site: Site) -> None:
    site.engine.facts = SCORING
    objects = [{"text": text, "title": "t"} for text in DOCUMENTS]
    answer = (await post(site, "/v1/rerank", query="Hi", documents=objects, top_n=2, return_documents=False)).json()
    assert [sorted(one) for one in answer["results"]] == [["index", "relevance_score"]] * 2
    assert len((await post(site, "/v1/rerank", query="Hi", documents=DOCUMENTS, top_n=0)).json()["results"]) == 3


@served()
async def test_pairs_are_cut_the_longer_text_first_and_told(site: Site) -> None:
    site.engine.facts = SCORING
    answer = (await post(site, "/v1/rerank", query="Hi", documents=["a", "word " * 60])).json()
    (cut,) = answer["truncated"]
    assert (cut["index"], cut["kept"]) == (1, 24)
    answer = (await post(site, "/v1/rerank", query="Hi", documents=["word " * 60], max_tokens_per_doc=3)).json()
    assert "truncated" not in answer
    refused = await post(site, "/v1/rerank", query="Hi", documents=["word " * 60], truncate=False)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents")


@served()
async def test_scores_of_pairs(site: Site) -> None:
    site.engine.facts = SCORING
    one = (await post(site, "/v1/score", text_1="Hi", text_2=DOCUMENTS)).json()
    assert (one["object"], [score["object"] for score in one["data"]]) == ("list", ["score"] * 3)
    many = (await post(site, "/score", queries=["Hi"] * 3, documents=DOCUMENTS)).json()
    assert [score["score"] for score in many["data"]] == [score["score"] for score in one["data"]]
    assert len((await post(site, "/v1/score", text_1="Hi", text_2="Hello")).json()["data"]) == 1


@served()
async def test_a_model_that_embeds_ranks_by_the_cosine_of_prompted_texts(site: Site) -> None:
    site.engine.facts = EMBEDDING
    answer = (await post(site, "/v1/score", text_1="Hi", text_2=DOCUMENTS)).json()
    vectors = [
        np.array(vector_of(PoolInput(pack_ids(demo_tokens().encode(text, special=True))), 8))
        for text in ("q: Hi", *DOCUMENTS)
    ]
    assert np.allclose([one["score"] for one in answer["data"]], [vectors[0] @ other for other in vectors[1:]])
    assert len(site.engine.pooled[-1][1]) == 4  # the query once
    each = (await post(site, "/v1/score", text_1=["Hi", "Ho"], text_2=["Hi", "Ho"], truncate_prompt_tokens=1)).json()
    assert {cut["index"] for cut in each["truncated"]} == {0, 1}


@served()
async def test_a_classifier_cannot_rank(site: Site) -> None:
    site.engine.facts = structs.replace(SCORING, pooling=PoolingFacts(3))
    answer = await post(site, "/v1/rerank", query="Hi", documents=DOCUMENTS)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


BAD: list[tuple[str, str, dict[str, Any]]] = [
    ("/v1/rerank", "query", {"documents": ["a"]}),
    ("/v1/rerank", "query", {"query": ["a"], "documents": ["a"]}),
    ("/v1/rerank", "documents", {"query": "a"}),
    ("/v1/rerank", "documents", {"query": "a", "documents": []}),
    ("/v1/rerank", "documents", {"query": "a", "documents": "b"}),
    ("/v1/rerank", "documents", {"query": "a", "documents": [1]}),
    ("/v1/rerank", "documents", {"query": "a", "documents": [{"title": "b"}]}),
    ("/v1/rerank", "documents", {"query": "a", "documents": ["b"] * 10_001}),
    ("/v1/rerank", "top_n", {"query": "a", "documents": ["b"], "top_n": -1}),
    ("/v1/rerank", "max_tokens_per_doc", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 0}),
    ("/v1/rerank", "rank_fields", {"query": "a", "documents": ["b"], "rank_fields": ["x"]}),
    ("/v1/score", "text_1", {"text_2": "a"}),
    ("/v1/score", "text_2", {"text_1": "a"}),
    ("/v1/score", "text_1", {"text_1": "a", "queries": "b", "text_2": "c"}),
    ("/v1/score", "text_1", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}),
    ("/v1/score", "queries", {"queries": ["a", "b"], "text_2": "c"}),
    ("/v1/score", "text_1", {"text_1": [], "text_2": "c"}),
    ("/v1/score", "text_2", {"text_1": "a", "text_2": [{}]}),
]


@served()
async def test_bad_fields_are_named(site: Site) -> None:
    site.engine.facts = SCORING
    for path, param, body in BAD:
        answer = await site.http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (body, answer.text)
    assert site.engine.pooled == []
