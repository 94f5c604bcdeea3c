"""The route of the search by meaning: the sessions whose vectors are next to that of a query.

Vectors are made by an embedding model that is loaded, when they are first needed, some with each request: what a
request may cost is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from pydantic import AfterValidator, Field
from starlette.responses import Response

from server.api.embeddings.pooling_call import Vectors, pool
from server.api.embeddings.schemas import Pooling
from server.api.embeddings.tokenising import Inputs, prompt_length
from server.api.sessions.embedding_routes import average, session_inputs
from server.api.sessions.objects import SessionObject, found_object
from server.api.sessions.schemas import has_words
from server.errors import ApiError
from server.http.body import JsonRoute
from server.http.json_response import json_response
from server.models.registry import allowed_models, registry_of
from server.schemas.query import Query as Fields
from server.turns.context import ServerContext, context_of

router = APIRouter(route_class=JsonRoute)
BUDGET = 4096  # tokens of sessions that one request embeds, about
LOOKED_AT = 64  # sessions without a vector that one request reads
WINDOWS = 8  # of a session that are searched: the newest


class SimilarSessions(Fields):
    """``GET /v1/similar_sessions``: up to ``limit`` sessions of which something is like ``query``."""

    query: Annotated[str, Field(max_length=200), AfterValidator(has_words)]
    limit: int = Field(10, ge=1, le=100)


class SimilarSession(msgspec.Struct, frozen=True):
    """A session, and the cosine of its vector and the query's."""

    score: float
    session: SessionObject


class SimilarSessionList(msgspec.Struct, frozen=True, tag_field="object", tag="list"):
    """The best first. ``model``: that made the vectors; null: none that embeds is loaded. ``pending``: there are
    sessions without a vector of this model, of which the next request makes some.
    """

    data: list[SimilarSession]
    model: str | None
    pending: bool


@router.get("/v1/similar_sessions")
async def list_similar_sessions(query: Annotated[SimilarSessions, Query()], request: Request) -> Response:
    """Search the tenant's sessions by meaning, with an embedding model that is loaded; without one none is found."""
    registry = registry_of(request)
    offered = registry.offered_models(allowed_models(request))
    model = next((one for one in offered if one.is_loaded and one.task == "embed"), None)
    if model is None:
        return json_response(SimilarSessionList([], None, False))
    async with registry.using(request, model.name, None, ("embed",)):
        context, tenant = context_of(request), request.state.tenant
        asked, pending = await embed_some(request, context, query.query)
        known = await context.log.vectors.of(tenant, context.facts.fingerprint)
        scores = await context.tokens.run(closest, asked, known, query.limit)
        found = {one.id: one for one in await context.log.find_by_names(tenant, [*scores])}
        data = [
            SimilarSession(score, found_object(context, tenant, found[name], []))
            for name, score in scores.items()
            if name in found
        ]
        return json_response(SimilarSessionList(data, context.served_name, pending))


async def embed_some(request: Request, context: ServerContext, query: str) -> tuple[Vectors, bool]:
    """The vector of a query. Those of some sessions without one are made in the same step, and kept; whether there are
    more.
    """
    facts, log, tenant = context.facts, context.log, request.state.tenant
    assert facts.pooling is not None
    inputs = await context.tokens.run(query_input, query, context)
    due = await log.vectors.missing(tenant, facts.fingerprint, LOOKED_AT + 1)
    parts: list[tuple[str, int, Inputs]] = []
    for name, rows in due[:LOOKED_AT]:
        record = await log.get(tenant, name)
        if record is None:
            continue
        try:
            part = await context.tokens.run(session_inputs, record, context.tokens, facts, WINDOWS)
        except ApiError:
            part = Inputs("session_id")  # nothing was said
        parts.append((name, rows, part))
        inputs.made += part.made
        inputs.tokens += part.tokens
        if inputs.tokens >= BUDGET:
            break
    vectors = await pool(request, context, "embeddings", inputs)
    at = 1
    for name, rows, part in parts:
        some = vectors[at : at + len(part.made)]
        at += len(part.made)
        kept = average(some, part, facts.pooling).astype("<f4").tobytes() if part.made else b""
        await log.vectors.put(tenant, name, rows, facts.fingerprint, kept)
    return vectors[0], len(due) > len(parts)


def query_input(query: str, context: ServerContext) -> Inputs:
    """A query, with the prompt of the checkpoint for queries. Blocking."""
    facts, tokens, made = context.facts, context.tokens, Inputs("query")
    assert facts.pooling is not None
    prompt = facts.pooling.prompts.get("query", "")
    skip = prompt_length(prompt, tokens) if prompt else 0
    limit = facts.max_context
    made.add(Pooling.model_validate({}), tokens.encode_within(prompt + query, limit), limit, None, skip)
    return made


def closest(asked: Vectors, known: Sequence[tuple[str, bytes]], limit: int) -> dict[str, float]:
    """The names with the highest cosines, best first. Blocking."""
    import numpy as np

    named = [(name, vector) for name, data in known if len(vector := np.frombuffer(data, "<f4")) == len(asked)]
    if not named:
        return {}
    whole = np.stack([vector for _, vector in named])
    lengths = np.linalg.norm(whole, axis=1) * np.linalg.norm(asked)
    scores = whole @ asked / np.maximum(lengths, 1e-12)
    return {named[place][0]: round(float(scores[place]), 6) for place in np.argsort(-scores, kind="stable")[:limit]}
