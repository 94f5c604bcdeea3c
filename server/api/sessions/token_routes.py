"""Routes of a reply's tokens: the logged ones, and what else the model could have said in the place of one.

For the alternatives the logged tokens before that place are a prompt with a reply of one token: their KV is reused, and
one token is computed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from fastapi import Path as PathParameter
from pydantic import Field
from starlette.responses import Response

from server.api.openai.completions import create_completion
from server.api.sessions.routes import require_session, session_of_path
from server.chat.chat_tokenizer import ChatTokenizer
from server.errors import ApiError, bad_request
from server.http.body import JsonRoute, takes_turn
from server.http.json_response import json_response
from server.log.timeline import SessionRecord
from server.schemas.common_objects import DataList
from server.schemas.completion_requests import CompletionRequest
from server.schemas.field_types import INT32
from server.schemas.strict import Strict
from server.turns.context import ServerContext, context_of

router = APIRouter(route_class=JsonRoute)
MOST = 20  # alternatives
BEFORE = 8  # tokens that a token's text is decoded behind: it may depend on those
TurnNumber = Annotated[int, PathParameter(ge=1, le=INT32)]


class AlternativesRequest(Strict):
    """``POST /v1/sessions/{id}/alternatives``: of the token number ``token``, from 0, of the reply of a turn."""

    model: str = Field("", max_length=512)
    turn: Annotated[int, Field(ge=1, le=INT32)]
    token: Annotated[int, Field(ge=0, le=INT32)]
    count: Annotated[int, Field(ge=1, le=MOST)] = 5


class ReplyToken(msgspec.Struct, frozen=True):
    """A token of a reply. Of a character that several tokens write together, the last one has the text."""

    id: int
    text: str


class Alternative(msgspec.Struct, frozen=True):
    """A token that could have come, with its log-probability; ``chosen`` is the one that did."""

    id: int
    text: str
    logprob: float
    chosen: bool


class Alternatives(msgspec.Struct, frozen=True, tag_field="object", tag="token_alternatives"):
    """The likeliest tokens in a place, likeliest first. ``before`` is the text of the reply up to there."""

    before: str
    data: list[Alternative]


def reply_of(context: ServerContext, record: SessionRecord, number: int) -> tuple[int, Sequence[int]]:
    """Where the reply of a turn begins in the timeline, and its tokens. Raises a 404, or a 400 for tokens of another
    tokenizer.
    """
    if number > len(record.turns):
        raise ApiError(404, "There is no such turn.", param="turn", code="turn_not_found")
    if record.fingerprint != context.fingerprint:
        raise bad_request("This session's tokens are those of another tokenizer.", code="other_tokenizer")
    turn = record.turns[number - 1]
    return turn.prompt_tokens, record.tokens[turn.prompt_tokens : turn.tokens]


def texts_of(tokens: ChatTokenizer, before: Sequence[int], ids: Sequence[int]) -> list[str]:
    """The text that each token adds."""
    whole = [*before[-BEFORE:], *ids]
    start, texts = len(whole) - len(ids), []
    held = start  # tokens from here on have written a part of a character
    for at in range(start, len(whole)):
        begin = max(0, held - BEFORE)
        old, new = tokens.decode(whole[begin:held]), tokens.decode(whole[begin : at + 1])
        if new.endswith("\ufffd") and at + 1 < len(whole):
            texts.append("")
            continue
        texts.append(new[len(old) :] if new.startswith(old) else new)
        held = at + 1
    return texts


@router.get("/v1/sessions/{session_id}/turns/{turn}/tokens")
async def list_tokens(session_id: str, turn: TurnNumber, request: Request) -> Response:
    """List the tokens of a turn's reply, as they were generated."""
    context = context_of(request)
    record = await require_session(context, session_of_path(request, session_id))
    start, ids = reply_of(context, record, turn)
    texts = await context.tokens.run(texts_of, context.tokens, record.tokens[:start], ids)
    return json_response(DataList([ReplyToken(id_, text) for id_, text in zip(ids, texts, strict=True)]))


@router.post("/v1/sessions/{session_id}/alternatives")
@takes_turn
async def list_alternatives(session_id: str, body: AlternativesRequest, request: Request) -> Response:
    """List the likeliest tokens in the place of one token of a reply. The session does not change; what its cache has
    is reused."""
    context = context_of(request)
    record = await require_session(context, session_of_path(request, session_id))
    start, ids = reply_of(context, record, body.turn)
    if body.token >= len(ids):
        raise bad_request(f"token can be at most {len(ids) - 1} in this reply.", "token", "invalid_value")
    prompt = [*record.tokens[: start + body.token]]
    wish = {"model": body.model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0, "logprobs": body.count}
    asked = CompletionRequest.model_validate({**wish, "ignore_eos": True, "return_tokens_as_token_ids": True})
    answer = await create_completion(asked, request)
    (ranked,) = json.loads(bytes(answer.body))["choices"][0]["logprobs"]["top_logprobs"]
    found = {int(name.rpartition(":")[2]): logprob for name, logprob in ranked.items()}
    best = sorted(found, key=lambda id_: -found[id_])[: body.count]

    def describe_alternatives(tokens: ChatTokenizer) -> Alternatives:
        behind = prompt[-BEFORE:]
        before = tokens.decode(behind)

        def text(id_: int) -> str:
            return tokens.decode([*behind, id_]).removeprefix(before)

        data = [Alternative(id_, text(id_), found[id_], id_ == ids[body.token]) for id_ in best]
        return Alternatives("".join(texts_of(tokens, record.tokens[:start], ids[: body.token])), data)

    return json_response(await context.tokens.run(describe_alternatives, context.tokens))
