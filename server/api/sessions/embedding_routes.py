"""The route of a session's embedding: one vector, for a search over sessions.

An embedding model reads what was said. A session that is longer than this model takes is read in windows, whose vectors
are averaged by their tokens. A model that generates gives its last hidden state behind the session's last token, from
the KV that the session has.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
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
from server.chat.chat_tokenizer import ChatTokenizer
from server.errors import bad_request
from server.http.body import JsonRoute, asks
from server.http.json_response import json_response
from server.log.timeline import SessionRecord
from server.schemas.field_types import INT32
from server.schemas.strict import Strict
from server.turns.context import context_of
from server.turns.session_state import session_state

router = APIRouter(route_class=JsonRoute)
MOST_WINDOWS = 256  # the newest ones of a session
SAID = ("user", "assistant")  # roles whose messages count


class SessionEmbeddingRequest(Strict):
    """``POST /v1/sessions/{id}/embedding``. ``model``: by default the first one that embeds, or else generates."""

    model: str = Field("", max_length=512)
    dimensions: Annotated[int, Field(ge=1, le=INT32)] | None = None
    encoding_format: Literal["float", "base64"] = "float"


class SessionEmbedding(msgspec.Struct, frozen=True):
    """The vector of a session, of so many ``windows``. ``pooling``: how it was made of hidden states.
    ``cached_tokens``: of a model that generates, those whose KV was there.
    """

    session_id: str
    embedding: list[float] | str
    model: str
    windows: int
    usage: PoolingUsage
    pooling: tuple[str, ...]
    cached_tokens: int | UnsetType = UNSET
    object: str = "session.embedding"


@router.post("/v1/sessions/{session_id}/embedding")
@asks("embed", "generate")
async def embed_session(session_id: str, body: SessionEmbeddingRequest, request: Request) -> Response:
    """Embed a session. An embedding model reads the messages of users and the replies, without reasoning, calls of
    tools and their results. A model that generates gives its last hidden state of the session, from its KV. The session
    does not change."""
    context = context_of(request)
    context.check_model(body.model)
    facts = context.facts
    if facts.pooling is None:
        return await embed_by_state(session_id, body, request)
    check_dimensions(body.dimensions, facts.pooling)
    record = await require_session(context, session_of_path(request, session_id))
    inputs = await context.tokens.run(session_inputs, record, context.tokens, facts)
    vectors = await pool(request, context, "embeddings", inputs)
    whole = shorten(average(vectors, inputs, facts.pooling)[None], body.dimensions, facts.pooling)[0]
    usage = PoolingUsage(inputs.tokens, inputs.tokens)
    made = write(whole, body.encoding_format)
    name, pooling = context.served_name, facts.pooling.pooling
    return json_response(SessionEmbedding(session_id, made, name, len(inputs.made), usage, pooling))


async def embed_by_state(session_id: str, body: SessionEmbeddingRequest, request: Request) -> Response:
    """The last hidden state of a session, of unit length."""
    context, session = context_of(request), session_of_path(request, session_id)
    record = await require_session(context, session)
    state = await session_state(request, context, session.name, record)
    facts = PoolingFacts(len(state.vector), ("lasttoken",), normalised=True)
    check_dimensions(body.dimensions, facts)
    whole = shorten(unit(state.vector)[None], body.dimensions, facts)[0]
    usage = PoolingUsage(state.tokens, state.tokens)
    made = write(whole, body.encoding_format)
    return json_response(SessionEmbedding(session_id, made, context.served_name, 1, usage, facts.pooling, state.cached))


def session_inputs(record: SessionRecord, tokens: ChatTokenizer, facts: ModelFacts, most: int = MOST_WINDOWS) -> Inputs:
    """The text of a session in windows, at most the newest ``most``, as the engine takes it. Blocking. Raises a 400 for
    one without a text.
    """
    assert facts.pooling is not None
    said = [message.content for message in record.messages if message.role in SAID and message.content.strip()]
    if not said:
        raise bad_request("Nothing was said in this session yet.", code="empty_session")
    prompt = facts.pooling.prompts.get("document", "")
    skip = prompt_length(prompt, tokens) if prompt else 0
    around = len(tokens.encode(prompt, special=True))
    room = max(1, facts.max_context - around)
    ids = tokens.encode("\n\n".join(said), special=False)
    windows = [ids[start : start + room] for start in range(0, len(ids), room)][-most:]
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
    return unit(mean) if facts.normalised else mean


def unit(vector: Vectors) -> Vectors:
    """A vector of unit length."""
    import numpy as np

    made: Vectors = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return made
