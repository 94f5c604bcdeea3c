"""The route of a session's embedding: what was said in it as one vector, for a search over sessions.

The hidden states of the model that chats are not kept, and are not made for search: an embedding model reads the text.
A session that is longer than this model takes is read in windows, whose vectors are averaged by their tokens.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from scheduler.model_facts import ModelFacts, PoolingFacts
from scheduler.protocol import unpack_ids
from server.api.embeddings.objects import PoolingUsage
from server.api.embeddings.pooling_call import Vectors, pool
from server.api.embeddings.routes import check_dimensions, shorten, write
from server.api.embeddings.schemas import Pooling
from server.api.embeddings.tokenising import Inputs, prompt_length
from server.api.sessions.routes import require_session, session_of_path
from server.chat.tokenizer import ChatTokenizer
from server.errors import bad_request
from server.http.body import JsonRoute, asks
from server.http.json_response import json_response
from server.log.timeline import SessionRecord
from server.schemas.field_types import INT32
from server.schemas.strict import Strict
from server.turns.context import context_of

router = APIRouter(route_class=JsonRoute)
MOST_WINDOWS = 256  # the newest ones of a session
SAID = ("user", "assistant")  # roles whose messages count


class SessionEmbeddingRequest(Strict):
    """``POST /v1/sessions/{id}/embedding``. ``model`` is one that embeds; by default the first one."""

    model: str = Field("", max_length=512)
    dimensions: Annotated[int, Field(ge=1, le=INT32)] | None = None
    encoding_format: Literal["float", "base64"] = "float"


class SessionEmbedding(msgspec.Struct, frozen=True):
    """The vector of a session, of so many ``windows``."""

    session_id: str
    embedding: list[float] | str
    model: str
    windows: int
    usage: PoolingUsage
    object: str = "session.embedding"


@router.post("/v1/sessions/{session_id}/embedding")
@asks("embed")
async def embed_session(session_id: str, body: SessionEmbeddingRequest, request: Request) -> Response:
    """Embed what was said in a session, by an embedding model: the messages of users and the replies, without
    reasoning, calls of tools and their results. The session does not change."""
    context = context_of(request)
    context.check_model(body.model)
    facts = context.facts
    assert facts.pooling is not None, "its model was checked"
    check_dimensions(body.dimensions, facts.pooling)
    record = await require_session(context, session_of_path(request, session_id))
    inputs = await context.tokens.run(session_inputs, record, context.tokens, facts)
    vectors = await pool(request, context, "embeddings", inputs)
    whole = shorten(average(vectors, inputs, facts.pooling)[None], body.dimensions, facts.pooling)[0]
    usage = PoolingUsage(inputs.tokens, inputs.tokens)
    made = write(whole, body.encoding_format)
    return json_response(SessionEmbedding(session_id, made, context.served_name, len(inputs.made), usage))


def session_inputs(record: SessionRecord, tokens: ChatTokenizer, facts: ModelFacts) -> Inputs:
    """The text of a session in windows, as the engine takes it. Blocking. Raises a 400 for one without a text."""
    assert facts.pooling is not None
    said = [message.content for message in record.messages if message.role in SAID and message.content.strip()]
    if not said:
        raise bad_request("Nothing was said in this session yet.", code="empty_session")
    prompt = facts.pooling.prompts.get("document", "")
    skip = prompt_length(prompt, tokens) if prompt else 0
    around = len(tokens.encode(prompt, special=True))
    room = max(1, facts.max_context - around)
    ids = tokens.encode("\n\n".join(said), special=False)
    windows = [ids[start : start + room] for start in range(0, len(ids), room)][-MOST_WINDOWS:]
    made = Inputs("session_id")
    for window in windows:
        text = prompt + tokens.decode(window)
        made.add(
            Pooling.model_validate({}), tokens.encode_within(text, facts.max_context), facts.max_context, None, skip
        )
    return made


def average(vectors: Vectors, inputs: Inputs, facts: PoolingFacts) -> Vectors:
    """One vector of those of the windows, each weighed by its tokens; of unit length where the model's are."""
    import numpy as np

    weights = np.array([len(unpack_ids(one.ids)) for one in inputs.made], dtype=np.float32)
    mean: Vectors = (vectors * weights[:, None]).sum(axis=0) / weights.sum()
    return mean / max(float(np.linalg.norm(mean)), 1e-12) if facts.normalised else mean
