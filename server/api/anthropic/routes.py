"""Routes of Anthropic's Messages API; requests are translated to chats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from server.api.anthropic.as_chat import as_chat
from server.api.anthropic.compact_edit import CompactedChat, compact
from server.api.anthropic.context_edits import CompactEdit, apply_edits
from server.api.anthropic.diagnostics import Diagnosis, DiagnosticsTable, RequestDigest
from server.api.anthropic.objects import AppliedEdits, OriginalTokens, TokenCount
from server.api.anthropic.paused_reply import paused_message, paused_response
from server.api.anthropic.reply import AnthropicReply
from server.api.anthropic.schemas import AnthropicMessageParam, MessagesRequest, PromptRequest, since_compaction
from server.api.openai.chat import chat
from server.api.ops.tokenize import preview_prompt
from server.config.prompt_rules import BILLING_LINE
from server.errors import ApiError, bad_request
from server.http.body import JsonRoute, takes_turn
from server.http.json_response import json_response
from server.schemas.strict import Strict
from server.turns.context import context_of
from server.turns.naming import named_session
from server.turns.replies import Reply, ReplyHead

router = APIRouter(route_class=JsonRoute)
Body = TypeVar("Body", bound=PromptRequest)


class Parameters(Strict):
    """What clients write behind the question mark when they use what Anthropic calls a beta."""

    beta: Literal["true", "false"] | None = None


@router.post("/v1/messages")
@takes_turn
async def create_message(body: MessagesRequest, query: Annotated[Parameters, Query()], request: Request) -> Response:
    """Generate a message for a whole conversation, or with ``session_id`` for the new messages of a session."""
    body, edits = await with_edits(since_its_compaction(body), request)
    compaction = await compaction_of(body, request)
    if compaction is not None and compaction.block.encrypted_content is None:
        context = context_of(request)
        head = ReplyHead.new("msg", context.served_name, context.facts.fingerprint, None)
        id = head.id.replace("msg-", "msg_")
        message = paused_message(id, head.model, compaction.block, compaction.spent, edits)
        return paused_response(message, stream=body.stream)
    made = as_chat(body) if compaction is None else compaction.chat
    shows = body.thinking is None or body.thinking.display != "omitted"
    told = None if compaction is None else (compaction.block, compaction.spent)

    def make_reply(head: ReplyHead) -> Reply:
        named = replace(head, id=head.id.replace("chatcmpl-", "msg_"))
        stops, id, kept = made.stop or (), request.state.request_id, made.keep_seconds
        diagnosis = diagnosis_of(body, request)
        return AnthropicReply(named, id, kept, made.token_limit, shows, stops, edits, diagnosis, told)

    receipt = None if compaction is None else compaction.receipt
    return await chat(made, request, await named_session(request, body.session_id), make_reply, receipt)


async def compaction_of(body: MessagesRequest, request: Request) -> CompactedChat | None:
    """The compaction that the request asks for, if it does and one is due. Raises a 400 if that cannot be."""
    if body.compaction is not None:
        asked = CompactEdit(
            type="compact_20260112", instructions=body.compaction.instructions, pause_after_compaction=True
        )
        made = await compact(body, request, asked, "request")
        if made is None:
            raise bad_request("messages have nothing that could be summarised.", "messages", "invalid_value")
        return made
    edit = body.compact_edit
    most = context_of(request).facts.max_context
    if edit is None or await count_prompt(body, request) <= min(edit.trigger.value, most - 1):
        return None
    return await compact(body, request, edit, "threshold")


def since_its_compaction(body: Body) -> Body:
    """The request without what came before its last compaction."""
    return body.model_copy(update={"messages": [*since_compaction(body.messages)]})


def diagnosis_of(body: MessagesRequest, request: Request) -> Diagnosis | None:
    if body.diagnostics is None:
        return None
    digest = RequestDigest.of(body, folds=BILLING_LINE in context_of(request).tokens.rules)
    table: DiagnosticsTable = request.app.state.diagnostics
    return Diagnosis(table, request.state.tenant, body.diagnostics.previous_message_id, digest)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: PromptRequest, query: Annotated[Parameters, Query()], request: Request) -> Response:
    """Count the tokens of a message's prompt, after the edits that the request asks for, but for a compaction."""
    body = since_its_compaction(body)
    edited_body, edits = await with_edits(body, request)
    tokens = await count_prompt(edited_body, request)
    if edits is UNSET:
        return json_response(TokenCount(tokens))
    return json_response(TokenCount(tokens, OriginalTokens(await count_prompt(body, request))))


async def with_edits(body: Body, request: Request) -> tuple[Body, AppliedEdits | UnsetType]:
    """The request after the edits of its history that it asks for, and those that have changed something; UNSET where
    it asks for none.
    """
    if body.context_management is None:
        return body, UNSET

    async def count(messages: Sequence[AnthropicMessageParam]) -> int:
        return await count_prompt(body.model_copy(update={"messages": [*messages]}), request)

    messages, applied = await apply_edits(body.messages, body.context_management.edits, count)
    return body.model_copy(update={"messages": messages}), AppliedEdits(applied)


async def count_prompt(body: PromptRequest, request: Request) -> int:
    """The tokens of a prompt; of one that exceeds the context one more than that has."""
    try:
        return len((await preview_prompt(as_chat(body), request, await named_session(request, body.session_id))).ids)
    except ApiError as error:
        if error.body.error.code != "context_length_exceeded":
            raise
        return context_of(request).facts.max_context + 1
