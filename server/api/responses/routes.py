"""Routes of responses: create, stream, run in the background, retrieve, cancel, delete."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import ExitStack, suppress
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from server.api.responses import objects as objects
from server.api.responses.background import background_of
from server.api.responses.elsewhere import cancel_and_wait, read_stored_response, response_elsewhere
from server.api.responses.input_items import page_of
from server.api.responses.preparation import prepare_response
from server.api.responses.reading import make_prompt, read_conversation
from server.api.responses.reply import ResponseReply, events_of
from server.api.responses.response_branch import (
    CHAIN,
    ResponseBranch,
    branch_of,
    chain_of,
    find_branch,
    response_not_found,
    stored_response,
)
from server.api.responses.schemas import InputRequest, ListItems, ResponseRequest, RetrieveResponse
from server.api.sessions.routes import delete_held_session
from server.errors import bad_request
from server.http.body import JsonRoute, takes_turn
from server.http.json_response import json_response
from server.http.sse import EventStream, while_connected
from server.log.claims import SessionBusy
from server.log.identity import Session
from server.log.response_rows import UNFINISHED
from server.log.retries import Idempotency
from server.schemas.common_objects import DeletedObject
from server.schemas.items import parse_id
from server.turns.context import ServerContext, context_of, headers_of
from server.turns.pending_turn import PendingTurn
from server.turns.replay import idempotency_key_reused, idempotency_of
from server.turns.turn_runner import TurnRunner

router = APIRouter(route_class=JsonRoute)


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
    place = parse_id(response_id, "resp")
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
    return json_response(DeletedObject("response.deleted", response_id))


async def end_chain(context: ServerContext, tenant: str, name: str) -> None:
    """Delete a chain that has no responses, unless a turn holds it."""
    with suppress(SessionBusy):
        async with context.log.holding(tenant, name):
            if not await context.log.responses.count(tenant, name):
                await delete_held_session(context, Session(tenant, name, stateful=True))


async def cancel_response(response_id: str, request: Request) -> Response:
    """Cancel a background response; one that has ended is not changed, and one of another kind is a 400."""
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


# --- what was made before -------------------------------------------------------------------------------------


async def replay_response(
    context: ServerContext, tenant: str, body: ResponseRequest, branch: ResponseBranch, key: Idempotency
) -> Response | None:
    """The response that was made under this key; None when there is none. Raises a 422 when the key stands for another
    request, a 404 when the response was deleted."""
    places = [branch.session.name] if branch.session is not None else []
    if body.previous_response_id is not None:
        place = parse_id(body.previous_response_id, "resp")
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
