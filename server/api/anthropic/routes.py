"""Routes of Anthropic's Messages API; requests are translated to chats."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from msgspec import UNSET
from starlette.responses import Response

from server.api.anthropic.as_chat import as_chat
from server.api.anthropic.diagnostics import Diagnosis, DiagnosticsTable, RequestDigest
from server.api.anthropic.objects import AppliedEdits, TokenCount
from server.api.anthropic.reply import AnthropicReply
from server.api.anthropic.schemas import MessagesRequest, PromptRequest
from server.api.openai.chat import chat
from server.api.ops.tokenize import preview_prompt
from server.config.prompt_rules import BILLING_LINE
from server.http.body import JsonRoute, takes_turn
from server.http.json_response import json_response
from server.log.identity import named_session
from server.schemas.strict import Strict
from server.turns.context import context_of
from server.turns.replies import Reply, ReplyHead

router = APIRouter(route_class=JsonRoute)


class Parameters(Strict):
    """What clients write behind the question mark when they use what Anthropic calls a beta."""

    beta: Literal["true", "false"] | None = None


@router.post("/v1/messages")
@takes_turn
async def create_message(body: MessagesRequest, query: Annotated[Parameters, Query()], request: Request) -> Response:
    """Generate a message for a whole conversation, or with ``session_id`` for the new messages of a session."""
    made = as_chat(body)
    shows = body.thinking is None or body.thinking.display != "omitted"

    def make_reply(head: ReplyHead) -> Reply:
        named = replace(head, id=head.id.replace("chatcmpl-", "msg_"))
        stops, edits = made.stop or (), UNSET if body.context_management is None else AppliedEdits([])
        id, kept = request.state.request_id, made.keep_seconds
        return AnthropicReply(named, id, kept, made.token_limit, shows, stops, edits, diagnosis_of(body, request))

    return await chat(made, request, named_session(request, body.session_id), make_reply)


def diagnosis_of(body: MessagesRequest, request: Request) -> Diagnosis | None:
    """The diagnosis that the request asks for, if it does."""
    if body.diagnostics is None:
        return None
    digest = RequestDigest.of(body, folds=BILLING_LINE in context_of(request).tokens.rules)
    table: DiagnosticsTable = request.app.state.diagnostics
    return Diagnosis(table, request.state.tenant, body.diagnostics.previous_message_id, digest)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: PromptRequest, query: Annotated[Parameters, Query()], request: Request) -> Response:
    """Count the tokens of a message's prompt."""
    prompt = await preview_prompt(as_chat(body), request, named_session(request, body.session_id))
    return json_response(TokenCount(len(prompt.ids)))
