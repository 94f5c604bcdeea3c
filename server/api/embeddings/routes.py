"""The route of embeddings, as OpenAI has it."""

from __future__ import annotations

import base64

from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from scheduler.model_facts import PoolingFacts
from server.api.embeddings.objects import EmbeddingList, EmbeddingObject, PoolingUsage
from server.api.embeddings.pooling_call import Vectors, pool
from server.api.embeddings.schemas import EmbeddingRequest
from server.api.embeddings.tokenising import Inputs, embedding_inputs
from server.errors import bad_request
from server.http.body import JsonRoute, asks
from server.http.json_response import encoder
from server.turns.context import context_of

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/embeddings")
@asks("embed")
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Embed texts or token ids, each to a vector. Inputs that are too long are cut, and the answer tells which."""
    context = context_of(request)
    inputs, vectors = await embed(body, request)
    facts = context.facts.pooling
    assert facts is not None

    def written() -> bytes:
        shaped = shorten(vectors, body.dimensions, facts)
        data = [EmbeddingObject(index, write(row, body.encoding_format)) for index, row in enumerate(shaped)]
        usage = PoolingUsage(inputs.tokens, inputs.tokens)
        return encoder.encode(EmbeddingList(data, context.served_name, usage, truncated=inputs.cut or UNSET))

    return Response(await context.tokens.run(written), media_type="application/json")


async def embed(body: EmbeddingRequest, request: Request) -> tuple[Inputs, Vectors]:
    """The inputs of a request and their whole vectors. Raises a 400, and what ``pool`` raises."""
    context = context_of(request)
    context.check_model(body.model)
    facts = context.facts
    assert facts.pooling is not None, "its model was checked"
    check_dimensions(body.dimensions, facts.pooling)
    inputs = await context.tokens.run(embedding_inputs, body, context.tokens, facts)
    return inputs, await pool(request, context, "embeddings", inputs)


def check_dimensions(wanted: int | None, facts: PoolingFacts) -> None:
    """Raises a 400 for more numbers than a vector has."""
    if wanted is not None and wanted > facts.width:
        message = f"dimensions is more than the {facts.width} of this model's vectors."
        raise bad_request(message, "dimensions", "invalid_value")


def shorten(vectors: Vectors, dimensions: int | None, facts: PoolingFacts) -> Vectors:
    """The first numbers of each vector, of unit length again where the model's vectors have it and the request says how
    many it wants.
    """
    wanted = dimensions or facts.dimensions
    if not wanted or wanted == facts.width:
        return vectors
    cut = vectors[:, :wanted]
    if dimensions is None or not facts.normalised:
        return cut
    import numpy as np

    made: Vectors = cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12)
    return made


def write(vector: Vectors, encoding: str) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
