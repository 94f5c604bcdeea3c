"""Routes of Ollama's API that embed; requests are translated to those of ``/v1/embeddings``."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.api.embeddings.routes import embed, shorten, write
from server.api.embeddings.schemas import EmbeddingRequest
from server.api.ollama.models import keep_model
from server.api.ollama.objects import Embedded, OldEmbedding
from server.api.ollama.schemas import EmbedBody, OldEmbedBody, plain_name
from server.http.body import JsonRoute, asks
from server.http.json_response import encoder
from server.turns.context import context_of

router = APIRouter(route_class=JsonRoute)


@router.post("/api/embed")
@asks("embed")
async def ollama_embed(body: EmbedBody, request: Request) -> Response:
    """Embed one text or several. Inputs that are too long are cut, unless ``truncate`` is false."""
    began = time.perf_counter_ns()
    context = context_of(request)
    keep_model(request, body.model, body.keep_alive, "embed")
    given: dict[str, object] = {"model": plain_name(body.model), "input": body.input, "truncate": body.truncate}
    made = EmbeddingRequest.model_validate({**given, "dimensions": body.dimensions})
    inputs, vectors = await embed(made, request)
    facts = context.facts.pooling
    assert facts is not None

    def written() -> bytes:
        rows = [write(row, "float") for row in shorten(vectors, body.dimensions, facts)]
        return encoder.encode(Embedded(context.served_name, rows, time.perf_counter_ns() - began, 0, inputs.tokens))

    return Response(await context.tokens.run(written), media_type="application/json")


@router.post("/api/embeddings")
@asks("embed")
async def ollama_embeddings(body: OldEmbedBody, request: Request) -> Response:
    """Embed one text: the older form of ``/api/embed``."""
    keep_model(request, body.model, body.keep_alive, "embed")
    _, vectors = await embed(
        EmbeddingRequest.model_validate({"model": plain_name(body.model), "input": body.prompt}), request
    )
    facts = context_of(request).facts.pooling
    assert facts is not None
    answer = OldEmbedding(write(shorten(vectors, None, facts)[0], "float"))
    return Response(encoder.encode(answer), media_type="application/json")
