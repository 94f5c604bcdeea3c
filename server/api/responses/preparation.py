"""Prepares the turn of a response: its prompt, its rules, its reply, and a compaction before it where one is due."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import msgspec
from fastapi import Request

from server.api.responses import objects as objects
from server.api.responses.compacting import (
    CompactionRunner,
    compact_older,
    compacted_prompt,
    compaction_item,
    count_folded,
    folding_of,
    keep_conversation,
    prompt_within,
    question_prompt,
)
from server.api.responses.compaction_output import CompactionOutput
from server.api.responses.reading import ReadInput, make_prompt, read_conversation
from server.api.responses.reply import ResponseReply
from server.api.responses.response_branch import (
    CHAIN_SECONDS,
    ResponseBranch,
    branch_if_rewritten,
)
from server.api.responses.schemas import SEALED, ResponseRequest
from server.api.responses.tool_schemas import tool_objects
from server.chat.compaction import can_be_folded
from server.errors import ApiError, bad_request
from server.http.event_recording import EventRecording
from server.log.retries import Idempotency
from server.schemas.items import new_id
from server.schemas.requests import either
from server.turns.context import ServerContext, context_of
from server.turns.pending_turn import PendingTurn
from server.turns.replies import ReplyHead
from server.turns.reply_rules import chat_rules
from server.turns.summary import summary_rules, summary_turn
from server.turns.turn_runner import TurnRunner

ResponseWriter = Callable[..., ResponseReply]  # with the parameters of ResponseReply
NAMES = {  # of a chat's parameters -> of ours
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    ".function.parameters": ".parameters",
    "tool_choice.function.name": "tool_choice.name",
    "tool_choice.allowed_tools.tools": "tool_choice.tools",
}


async def prepare_response(
    request: Request,
    body: ResponseRequest,
    branch: ResponseBranch,
    key: Idempotency | None,
    claim: ExitStack,
    make_reply: ResponseWriter = ResponseReply,
) -> tuple[PendingTurn, TurnRunner, ResponseReply]:
    """The turn of a response on ``branch``, and the reply that it writes. Raises a 400 for a prompt that cannot be made
    or leaves no room for a reply.
    """
    context, tenant = context_of(request), request.state.tenant
    read = await read_conversation(context, tenant, body, branch)
    turn = PendingTurn(request, body, context, branch.session, branch.past, key, claim)
    if body.compacts_now:
        return await prepare_compaction(turn, body, branch, read, make_reply)
    turn, prompt = await prompt_within(turn, body, branch, read)
    compaction = None
    if prompt is None:
        compaction = await compact_older(turn, body, branch, read)
        turn, prompt = await compacted_prompt(turn, body, branch, read, compaction)
    if (other := await branch_if_rewritten(context, branch, prompt, key, claim)) is not None:
        branch = other
        read = await read_conversation(context, tenant, body, branch)
        if compaction is None:
            prompt = await make_prompt(context, read)
        else:
            turn, prompt = await compacted_prompt(turn, body, branch, read, compaction)
    with response_parameter_names():
        format, parallel = body.text.format.chat_format, body.parallel_tool_calls
        rules = await chat_rules(context, body, prompt, format, body.chat_tool_choice(read.names), parallel)
    if compaction is not None:
        turn = replace(turn, compaction=await keep_conversation(context, branch, compaction.receipt))
    if body.background and branch.is_new:
        branch = await create_session(context, branch)
    if turn.line is None:
        turn = replace(turn, session=branch.session, record=branch.past)
    item = None if compaction is None else compaction_item(prompt.messages)
    reply = new_reply(context, body, branch, read, partial(make_reply, compaction=item))
    return turn, TurnRunner(turn, [prompt], rules, reply), reply


async def prepare_compaction(
    turn: PendingTurn, body: ResponseRequest, branch: ResponseBranch, read: ReadInput, make_reply: ResponseWriter
) -> tuple[PendingTurn, TurnRunner, ResponseReply]:
    """The same for a request whose response is a compaction. Raises a 400 if there is nothing to compact."""
    context, whole = turn.context, read.conversation.messages
    if not can_be_folded(whole, len(whole)):
        raise bad_request("input has nothing that could be summarised.", "input", "invalid_value")
    folding = folding_of(turn, body, branch.past, read.names)
    asked, prompt = await folding.question(whole)
    short = await question_prompt(turn, body, read)
    if (other := await branch_if_rewritten(context, branch, short, turn.idempotency, turn.claim)) is not None:
        branch = other
    receipt = folding.receipt("request", count_folded(whole), parts=1)
    receipt = await keep_conversation(context, branch, receipt)
    if body.background and branch.is_new:
        branch = await create_session(context, branch)
    aside = summary_turn(asked, turn.claim, stream=body.stream)
    aside = replace(aside, line=asked.line, idempotency=turn.idempotency, compaction=receipt)
    if branch.session is not None:
        aside = replace(aside, session=branch.session, record=branch.past)
    reply = new_reply(context, body, branch, read, partial(make_reply, make_output=CompactionOutput))
    return aside, CompactionRunner(aside, prompt, short, await summary_rules(context, prompt), reply), reply


def new_reply(
    context: ServerContext,
    body: ResponseRequest,
    branch: ResponseBranch,
    read: ReadInput,
    make_reply: ResponseWriter = ResponseReply,
) -> ResponseReply:
    """The reply of a response that has not begun, of the class ``make_reply``."""
    name = None if branch.session is None else branch.session.name
    id = new_id("resp", name if body.store else None)
    response = _new_object(context, body, id)
    session = msgspec.UNSET if name is None else name
    return make_reply(
        ReplyHead(id, response.created_at, context.served_name, "", session),
        response,
        key=id.rpartition("_")[2] if body.store else None,
        names=read.names,
        inputs=read.items,
        begins=branch.begins,
        recording=EventRecording() if body.background else None,
        obfuscate=body.stream_options is not None and body.stream_options.include_obfuscation,
        seal=SEALED in body.include,
        logprobs=body.token_logprobs is not None,
    )


def _new_object(context: ServerContext, body: ResponseRequest, id: str) -> objects.ResponseObject:
    """The object of a response that has not begun: what was asked for, without output."""
    return objects.ResponseObject(
        id=id,
        created_at=int(time.time()),
        status="queued" if body.background else "in_progress",
        background=body.background,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=context.served_name,
        parallel_tool_calls=body.parallel_tool_calls,
        previous_response_id=body.previous_response_id,
        conversation=None if body.conversation_id is None else objects.ConversationRef(body.conversation_id),
        prompt_cache_key=body.prompt_cache_key,
        prompt_cache_retention=body.prompt_cache_retention,
        reasoning=objects.ReasoningConfig(body.reasoning.effort, body.reasoning.summary),
        safety_identifier=body.safety_identifier,
        store=body.store,
        temperature=either(body.temperature, context.facts.generation.temperature),
        text=body.text.to_object(),
        tool_choice=body.tool_choice_object(),
        tools=tool_objects(body.tools),
        top_logprobs=body.top_logprobs or 0,
        top_p=either(body.top_p, context.facts.generation.top_p),
        truncation=body.truncation,
        user=body.user or None,
        metadata=body.metadata,
    )


@contextmanager
def response_parameter_names() -> Iterator[None]:
    """Name parameters in errors about tools and formats as responses do, not as chats."""
    try:
        yield
    except ApiError as error:
        info = error.body.error
        message, param = info.message, info.param or ""
        for theirs, ours in NAMES.items():
            message, param = message.replace(theirs, ours), param.replace(theirs, ours)
        raise ApiError(error.status_code, message, param=param or None, code=info.code) from None


async def create_session(context: ServerContext, branch: ResponseBranch) -> ResponseBranch:
    """Create the branch's session before the turn, empty, whatever the prompt follows."""
    session = branch.session
    assert session is not None
    await context.log.create(session.tenant, session.name, ttl=CHAIN_SECONDS)
    record = await context.log.get(session.tenant, session.name)
    assert record is not None
    return replace(branch, past=record if branch.past is None else replace(branch.past, version=record.version))
