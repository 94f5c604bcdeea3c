"""Routes that score pairs of texts: reranking as Jina and Cohere have it, scores as vLLM has them."""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from server.api.embeddings.objects import (
    PoolingUsage,
    RankedDocument,
    RankedText,
    Ranking,
    ScoreList,
    ScoreObject,
)
from server.api.embeddings.pooling_call import Vectors, pool
from server.api.embeddings.schemas import RerankRequest, ScoreRequest
from server.api.embeddings.tokenising import Inputs, pair_inputs, single_inputs
from server.errors import bad_request
from server.http.body import JsonRoute, asks
from server.http.json_response import json_response
from server.turns.context import context_of

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/rerank")
@router.post("/v2/rerank")
@router.post("/rerank")
@asks("score", "embed")
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Order documents by how well they answer a query. A model that embeds orders them by the cosine of their
    vectors."""
    inputs, scores = await scored(body, request, "rerank")
    best = sorted(range(len(scores)), key=lambda place: -scores[place])[: body.top_n or None]
    results = [
        RankedDocument(place, scores[place], RankedText(body.documents[place]) if body.return_documents else UNSET)
        for place in best
    ]
    usage = PoolingUsage(inputs.tokens, inputs.tokens)
    name = context_of(request).served_name
    return json_response(Ranking(f"rerank-{uuid.uuid4().hex}", name, results, usage, truncated=inputs.cut or UNSET))


@router.post("/v1/score")
@router.post("/score")
@asks("score", "embed")
async def score(body: ScoreRequest, request: Request) -> Response:
    """Score pairs of texts. A model that embeds gives the cosine of their vectors."""
    inputs, scores = await scored(body, request, "score")
    data = [ScoreObject(index, value) for index, value in enumerate(scores)]
    usage, name = PoolingUsage(inputs.tokens, inputs.tokens), context_of(request).served_name
    made = ScoreList(f"score-{uuid.uuid4().hex}", int(time.time()), name, data, usage, truncated=inputs.cut or UNSET)
    return json_response(made)


async def scored(body: RerankRequest | ScoreRequest, request: Request, operation: str) -> tuple[Inputs, list[float]]:
    """The inputs of a request and the score of each pair. Raises a 400, and what ``pool`` raises."""
    context = context_of(request)
    context.check_model(body.model)
    facts = context.facts
    assert facts.pooling is not None, "its model was checked"
    if facts.task == "embed":
        inputs, queries = await context.tokens.run(single_inputs, body, context.tokens, facts)
        vectors = await pool(request, context, operation, inputs)
        return inputs, cosines(vectors[:queries], vectors[queries:])
    if facts.pooling.width != 1:
        message = f"This model gives {facts.pooling.width} scores for a pair: it classifies, and cannot rank."
        raise bad_request(message, "model", "wrong_model_task")
    inputs = await context.tokens.run(pair_inputs, body, context.tokens, facts)
    vectors = await pool(request, context, operation, inputs)
    return inputs, [float(value) for value in vectors[:, 0]]


def cosines(queries: Vectors, documents: Vectors) -> list[float]:
    """The cosine of each document's vector with its query's, or with that of the only query."""
    import numpy as np

    sizes = np.linalg.norm(queries, axis=1) * np.linalg.norm(documents, axis=1)
    made: list[float] = ((queries * documents).sum(axis=1) / np.maximum(sizes, 1e-12)).tolist()
    return made
