"""Routes of responses: create, stream, run in the background, retrieve, cancel, delete."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from server.api.responses import objects as objects
from server.api.responses.background import background_of
from server.api.responses.branches import (
    CHAIN,
    CHAIN_SECONDS,
    ResponseBranch,
    branch_if_rewritten,
    branch_of,
    chain_of,
    find_branch,
    response_not_found,
    stored_response,
)
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
from server.api.responses.elsewhere import cancel_and_wait, read_stored_response, response_elsewhere
from server.api.responses.event_recording import EventRecording
from server.api.responses.input_items import page_of
from server.api.responses.reading import ReadInput, make_prompt, read_conversation
from server.api.responses.reply import ResponseReply, events_of
from server.api.responses.schemas import SEALED, InputRequest, ListItems, ResponseRequest, RetrieveResponse
from server.api.responses.tool_schemas import tool_objects
from server.api.sessions.routes import delete_held_session
from server.chat.compaction import can_be_folded
from server.errors import ApiError, bad_request
from server.http.body import JsonRoute, takes_turn
from server.http.json_response import json_response
from server.http.sse import EventStream, while_connected
from server.log.claims import SessionBusy
from server.log.identity import Session
from server.log.response_rows import UNFINISHED
from server.log.retries import Idempotency
from server.schemas.items import new_id, parsed_id
from server.schemas.requests import either
from server.turns.context import ServerContext, context_of, headers_of
from server.turns.pending_turn import PendingTurn
from server.turns.replay import idempotency_key_reused, idempotency_of
from server.turns.replies import ReplyHead
from server.turns.reply_rules import chat_rules
from server.turns.summary import summary_rules, summary_turn
from server.turns.turn_runner import TurnRunner

router = APIRouter(route_class=JsonRoute)
ResponseWriter = Callable[..., ResponseReply]  # with the parameters of ResponseReply
NAMES = {  # of a chat's parameters -> of ours
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    ".function.parameters": ".parameters",
    "tool_choice.function.name": "tool_choice.name",
    "tool_choice.allowed_tools.tools": "tool_choice.tools",
}


@router.post("/v1/responses")
@takes_turn
async def create_response(body: ResponseRequest, request: Request) -> Response:
    """Generate a response, optionally continuing a conversation or an earlier response."""
    context, tenant = context_of(request), request.state.tenant
    context.check(body, None)
    key = idempotency_of(request, body)
    if key is not None and not body.store:
        raise bad_request(
            "Idempotency-Key needs store: true, as a retry is answered from the stored response.", "Idempotency-Key"
        )
    with ExitStack() as claim:
        if body.background:
            claim.enter_context(background_of(request).slot())
        branch = await branch_of(context, tenant, body, body.store, key, claim)
        context.check(body, branch.session)
        if key is not None and (answer := await replay_response(context, tenant, body, branch, key)) is not None:
            return answer
        prepared = prepare_response(request, body, branch, key, claim)
        if body.compacts_if_long or body.compacts_now:  # which may take as long as a reply
            turn, runner, reply = await while_connected(request.receive, prepared)
        else:
            turn, runner, reply = await prepared
        return await (run_in_background(turn, runner, reply) if body.background else runner.respond())


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(body: InputRequest, request: Request) -> Response:
    """Count the tokens of a response's prompt."""
    context, tenant = context_of(request), request.state.tenant
    context.check(body, None)
    read = await read_conversation(context, tenant, body, await find_branch(context, tenant, body))
    return json_response(objects.InputTokens(len((await make_prompt(context, read)).ids)))


@router.get("/v1/responses/{response_id}")
async def retrieve_response(
    response_id: str, query: Annotated[RetrieveResponse, Query()], request: Request
) -> Response:
    """Get a response, also while it runs; with ``stream``, the events of a background response."""
    context, tenant = context_of(request), request.state.tenant
    running = background_of(request).get(tenant, response_id)
    start = 0 if query.starting_after is None else query.starting_after + 1
    if running is not None:
        if not query.stream:
            if running.reply.response.status not in UNFINISHED:
                await running.released.wait()  # who reads that it is over may go on from it at once
            return json_response(running.reply.response)
        assert running.reply.recording is not None
        return stream_events(running.reply.recording.follow(start))
    stored = await read_stored_response(context, tenant, response_id)
    if stored.status in UNFINISHED:
        if query.stream:
            raise response_elsewhere()
        running_there = json.dumps({**json.loads(stored.body), "status": "in_progress"}, ensure_ascii=False)
        return Response(running_there, media_type="application/json")
    if not query.stream:
        return Response(stored.body, media_type="application/json")
    if not json.loads(stored.body)["background"]:
        raise bad_request("stream needs a response that was created with background: true.", "stream", "invalid_value")
    return stream_events(iterate_events(events_of(stored, start)))


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request) -> Response:
    """Delete a response, and its chain if it was the last one."""
    context, tenant = context_of(request), request.state.tenant
    place = parsed_id(response_id, "resp")
    if place is None:
        raise response_not_found()
    running = background_of(request).get(tenant, response_id)
    if running is not None:
        await running.cancel()
    await cancel_and_wait(context, tenant, response_id)
    left = await context.log.responses.delete(tenant, *place)
    if left is None:
        raise response_not_found()
    if left == 0 and place[0].startswith(CHAIN):
        await end_chain(context, tenant, place[0])
    return json_response(objects.ResponseDeleted(response_id))


async def end_chain(context: ServerContext, tenant: str, name: str) -> None:
    """Delete a chain that has no responses, unless a turn holds it."""
    with suppress(SessionBusy):
        async with context.log.holding(tenant, name):
            if not await context.log.responses.count(tenant, name):
                await delete_held_session(context, Session(tenant, name, stateful=True))


async def cancel_response(response_id: str, request: Request) -> Response:
    """Cancel a background response; one that has ended is not changed."""
    context, tenant = context_of(request), request.state.tenant
    running = background_of(request).get(tenant, response_id)
    if running is not None:
        await running.cancel()
    stored = await cancel_and_wait(context, tenant, response_id)
    if not json.loads(stored.body)["background"]:
        raise bad_request("Only responses that were created with background: true can be cancelled.")
    return Response(stored.body, media_type="application/json")


# Clients send no body: it is not read.
router.add_api_route(
    "/v1/responses/{response_id}/cancel", cancel_response, methods=["POST"], route_class_override=APIRoute
)


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(response_id: str, query: Annotated[ListItems, Query()], request: Request) -> Response:
    """List the input items of a response."""
    _, stored = await stored_response(context_of(request), request.state.tenant, response_id)
    if stored is None:
        raise response_not_found()
    return json_response(page_of(json.loads(stored.inputs), query))


# --- how a response is made -----------------------------------------------------------------------------------


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
    now = int(time.time())
    response = objects.ResponseObject(
        id=id,
        created_at=now,
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
    session = msgspec.UNSET if name is None else name
    return make_reply(
        ReplyHead(id, now, context.served_name, "", session),
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


# --- in the background ----------------------------------------------------------------------------------------


async def run_in_background(turn: PendingTurn, runner: TurnRunner, reply: ResponseReply) -> Response:
    """Start the response and answer at once: with the queued response, or with the stream of its events."""
    session, recording = turn.session, reply.recording
    assert session is not None
    assert recording is not None
    choices = runner.submit()
    try:
        queued = reply.response
        await turn.context.log.responses.put(session.tenant, session.name, reply.to_stored())
    except BaseException:
        choices.close()
        raise
    for event in reply.begin():
        reply.encode_event(event)
    background_of(turn.request).start(session, reply, runner, choices, turn.claim)
    if turn.body.stream:
        return stream_events(recording.follow(0), session)
    return json_response(queued, headers=headers_of(session))


async def create_session(context: ServerContext, branch: ResponseBranch) -> ResponseBranch:
    """Create the branch's session before the turn, empty, whatever the prompt follows."""
    session = branch.session
    assert session is not None
    await context.log.create(session.tenant, session.name, ttl=CHAIN_SECONDS)
    record = await context.log.get(session.tenant, session.name)
    assert record is not None
    return replace(branch, past=record if branch.past is None else replace(branch.past, version=record.version))


# --- what was made before -------------------------------------------------------------------------------------


async def replay_response(
    context: ServerContext, tenant: str, body: ResponseRequest, branch: ResponseBranch, key: Idempotency
) -> Response | None:
    """The response that was made under this key; None when there is none. Raises a 422 when the key stands for another
    request, a 404 when the response was deleted."""
    places = [branch.session.name] if branch.session is not None else []
    if body.previous_response_id is not None:
        place = parsed_id(body.previous_response_id, "resp")
        places += [chain_of(key)] if place is None else [place[0], chain_of(key)]
    for name in dict.fromkeys(places):
        found = await context.log.responses.of_key(tenant, name, key.key)
        if found is None:
            continue
        request_hash, stored = found
        if request_hash != key.request_hash:
            raise idempotency_key_reused()
        if stored is None:
            raise response_not_found()
        headers = {**headers_of(Session(tenant, name, stateful=True)), "idempotent-replayed": "true"}
        if not body.stream:
            return Response(stored.body, headers=headers, media_type="application/json")
        return EventStream(iterate_events(events_of(stored, 0)), lambda: None, headers, done=b"")
    return None


def stream_events(events: AsyncGenerator[bytes], session: Session | None = None) -> EventStream:
    """Events as a streamed response; if the client disconnects, the response goes on."""
    return EventStream(events, lambda: None, headers_of(session), done=b"")


async def iterate_events(events: Iterable[bytes]) -> AsyncGenerator[bytes]:
    """One after the other."""
    for event in events:
        yield event
