"""Routes of sessions: create, list, inspect, update, fork, rewind, edit, regenerate, delete.

Changes that need a fixed timeline hold the session, so they never run at the same time as a turn: the later one gets a
409. Reads and updates do not hold it; a deletion ends the running turn and waits for it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi import Path as PathParameter
from fastapi.routing import APIRoute
from msgspec import UNSET
from starlette.responses import Response

from scheduler.protocol import Warm
from server.api.openai.chat import replay_chat, run_chat
from server.api.sessions import objects as objects
from server.api.sessions.objects import live_session_object, session_object
from server.api.sessions.schemas import (
    CreateSession,
    EditMessage,
    ForkSession,
    ListSessions,
    MetadataKeys,
    RewindSession,
    RunningTurnQuery,
    UpdateSession,
)
from server.chat.cutting import cut_reply
from server.chat.prompts import check_bytes, regeneration_prompt
from server.errors import ApiError, bad_request
from server.http.body import JsonRoute, takes_turn
from server.http.json_response import json_response
from server.http.media_admission import media_of
from server.log.claims import SessionBusy
from server.log.identity import Session, stated_session
from server.log.listing import SessionFilter
from server.log.search_index import words_of
from server.log.timeline import NoSuchPlace, SessionRecord, UnknownSession, drop_reply
from server.schemas.common_objects import DataList, DataPage, DeletedObject
from server.schemas.field_types import INT32
from server.schemas.messages import check_calls
from server.schemas.requests import ReplyRequest
from server.turns.context import ServerContext, context_of, headers_of
from server.turns.pending_turn import open_turn

router = APIRouter(route_class=JsonRoute)
DELETE_SECONDS = CANCEL_SECONDS = 10.0  # for a running turn to end once it was told to
NUDGE_SECONDS = 0.25  # a turn that was just about to start is told again


def session_of_path(request: Request, session_id: str) -> Session:
    """The session of the path. Raises a 400 for an invalid id."""
    session = stated_session(request, None, session_id)
    assert session is not None
    return session


def new_id() -> str:
    """An id for a session whose client gave none."""
    return f"sess_{uuid.uuid4().hex}"


async def require_session(context: ServerContext, session: Session) -> SessionRecord:
    """The session's record. Raises UnknownSession, also for another tenant's."""
    record = await context.log.get(session.tenant, session.name)
    if record is None:
        raise UnknownSession
    return record


@contextmanager
def translate_no_such_place() -> Iterator[None]:
    """Converts NoSuchPlace to an ApiError."""
    try:
        yield
    except NoSuchPlace as error:
        if error.param == "index":
            raise ApiError(404, "There is no such message.", param="index", code="message_not_found") from None
        message = f"{error.param} can be at most {error.last} in this session."
        raise bad_request(message, error.param, "invalid_value") from None


@router.post("/v1/sessions", status_code=201)
async def create_session(body: CreateSession, request: Request) -> Response:
    """Create a session, optionally with messages to begin from."""
    context = context_of(request)
    messages = [message.plain() for message in body.messages]
    check_calls([], messages)
    if context.engine.facts is not None:
        check_bytes((m.content for m in messages), context.engine.facts, "messages")
    session = Session(request.state.tenant, body.id or new_id(), stateful=True)
    until = pinned_until(body.pin_seconds)
    async with context.log.holding(session.tenant, session.name):
        summary = await context.log.create(
            session.tenant,
            session.name,
            messages=messages,
            metadata=body.metadata,
            ttl=body.ttl_seconds,
            pinned_until=until,
            media=media_of(request),
        )
        if until is not None:
            context.engine.pin(session.tenant, session.name, until)
        return json_response(await live_session_object(context, session, summary), 201)


def pinned_until(seconds: int) -> int | None:
    """The end of a pin that begins now; None for no seconds."""
    return int(time.time()) + seconds if seconds else None


@router.get("/v1/sessions")
async def list_sessions(query: Annotated[ListSessions, Query()], request: Request) -> Response:
    """List the tenant's sessions, or with `query` those whose messages or titles have its words, with `hits`."""
    context = context_of(request)
    try:
        chosen = SessionFilter(
            query.metadata or {},
            query.prefix,
            query.used_after,
            query.used_before,
            query.fingerprint,
            query.model,
            words_of(query.query or ""),
        )
        descending = query.order == "desc"
        page = await context.log.page(
            request.state.tenant, chosen, limit=query.limit, after=query.after, descending=descending
        )
    except UnknownSession:
        raise ApiError(404, "There is no session with this id.", param="after", code="session_not_found") from None
    tenant = request.state.tenant
    if page.hits is None:
        data = [session_object(context, tenant, item) for item in page.items]
    else:
        data = [objects.found_object(context, tenant, item, page.hits[item.id]) for item in page.items]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return json_response(DataPage(data, first, last, page.has_more))


@router.get("/v1/metadata_keys")
async def list_metadata_keys(query: Annotated[MetadataKeys, Query()], request: Request) -> Response:
    """List the keys that the metadata of the tenant's sessions has, at most 1000."""
    found = await context_of(request).log.metadata_keys(request.state.tenant, query.prefix)
    return json_response(DataList([objects.MetadataKey(key, count) for key, count in found]))


@router.get("/v1/sessions/{session_id}")
async def retrieve_session(session_id: str, request: Request) -> Response:
    """Get a session, without its text."""
    context, session = context_of(request), session_of_path(request, session_id)
    summary = await context.log.summary(session.tenant, session.name)
    if summary is None:
        raise UnknownSession
    return json_response(await live_session_object(context, session, summary))


@router.get("/v1/sessions/{session_id}/turns")
async def list_turns(session_id: str, request: Request) -> Response:
    """List the turns of the current timeline."""
    record = await require_session(context_of(request), session_of_path(request, session_id))
    return json_response(DataList(objects.turn_objects(record)))


@router.get("/v1/sessions/{session_id}/tree")
async def retrieve_tree(session_id: str, request: Request) -> Response:
    """Get the session and all sessions forked from it or its ancestors, with their turns, costs and KV."""
    context, session = context_of(request), session_of_path(request, session_id)
    family = await context.log.family(session.tenant, session.name)
    found = await asyncio.gather(
        *(objects.session_branch(context, session.tenant, member) for member in family.members)
    )
    branches = [branch for branch in found if branch is not None]
    return json_response(objects.SessionTree(family.root, branches, family.has_more))


@router.get("/v1/sessions/{session_id}/messages")
async def list_messages(session_id: str, request: Request) -> Response:
    """List the messages of the current timeline."""
    record = await require_session(context_of(request), session_of_path(request, session_id))
    return json_response(DataList(objects.message_objects(record)))


@router.get("/v1/sessions/{session_id}/running")
async def follow_turn(session_id: str, query: Annotated[RunningTurnQuery, Query()], request: Request) -> Response:
    """Get the turn that runs in the background (`background`), in a list that is empty if there is none; with `stream`
    the events of its stream from the first one on, also those to come. The session may begin with this turn."""
    context, session = context_of(request), session_of_path(request, session_id)
    turn = context.running.get(session.tenant, session.name)
    if not query.stream:
        found = [] if turn is None else [objects.running_turn_object(session.name, turn)]
        return json_response(DataList(found))
    if turn is None:
        raise ApiError(404, "No turn of this session runs in the background here.", code="no_running_turn")
    return turn.follow(headers_of(session))


@router.post("/v1/sessions/{session_id}")
async def update_session(session_id: str, body: UpdateSession, request: Request) -> Response:
    """Change metadata, TTL or pin, also while a turn is running."""
    context, session = context_of(request), session_of_path(request, session_id)
    until = UNSET if body.pin_seconds is None else pinned_until(body.pin_seconds)
    summary = await context.log.update(
        session.tenant,
        session.name,
        metadata=UNSET if body.metadata is None else body.metadata,
        ttl=body.ttl_seconds if body.sets_ttl else UNSET,
        pinned_until=until,
    )
    if until is not UNSET:  # at once: pins reach the engine in the order of the log
        context.engine.pin(session.tenant, session.name, until or 0)
        if until:  # it will be used: what has gone to disk is brought up now
            context.engine.warm(Warm(session.tenant, session.name, until=until))
    return json_response(await live_session_object(context, session, summary))


@router.post("/v1/sessions/{session_id}/fork", status_code=201)
async def fork_session(session_id: str, body: ForkSession, request: Request) -> Response:
    """Create a session with the same history, which shares its KV."""
    context, session = context_of(request), session_of_path(request, session_id)
    new = Session(session.tenant, body.id or new_id(), stateful=True)
    with ExitStack() as held:
        await context.log.hold(session.tenant, session.name, held)
        if new != session:  # then the log says that it exists
            await context.log.hold(new.tenant, new.name, held)
        with translate_no_such_place():
            summary = await context.log.fork(session.tenant, session.name, new.name, turn=body.turn)
        return json_response(await live_session_object(context, new, summary), 201)


@router.post("/v1/sessions/{session_id}/rewind")
async def rewind_session(session_id: str, body: RewindSession, request: Request) -> Response:
    """Cut the session back to the end of a turn, or to a token."""
    context, session = context_of(request), session_of_path(request, session_id)
    async with context.log.holding(session.tenant, session.name):
        reply = expect = None
        with translate_no_such_place():
            if body.tokens is not None:
                record = await require_session(context, session)
                tokens = context.tokens_of(record.fingerprint)
                reply = await tokens.run(cut_reply, tokens, record, body.tokens)
                expect = record.version
            summary = await context.log.rewind(
                session.tenant, session.name, turn=body.turn, tokens=body.tokens, reply=reply, expect=expect
            )
        return json_response(await live_session_object(context, session, summary))


@router.put("/v1/sessions/{session_id}/messages/{index}")
async def edit_message(
    session_id: str, index: Annotated[int, PathParameter(ge=0, le=INT32)], body: EditMessage, request: Request
) -> Response:
    """Replace the content of a message, text and pictures. Everything after it is dropped."""
    context, session = context_of(request), session_of_path(request, session_id)
    text, placed = body.plain
    if context.engine.facts is not None:
        check_bytes([text], context.engine.facts, "content")
    async with context.log.holding(session.tenant, session.name):
        with translate_no_such_place():
            summary = await context.log.edit(session.tenant, session.name, index, text, placed, media=media_of(request))
        return json_response(await live_session_object(context, session, summary))


@router.post("/v1/sessions/{session_id}/regenerate")
@takes_turn
async def regenerate(session_id: str, body: ReplyRequest, request: Request) -> Response:
    """Generate the last reply again, from exactly the same prompt. The old reply stays until the new one is
    committed."""
    session = stated_session(request, body.session_id, session_id)
    with ExitStack() as claim:
        turn = await open_turn(request, body, session, claim)
        context, record = turn.context, turn.record
        if record is None:
            raise UnknownSession
        if (answer := await replay_chat(turn, body)) is not None:
            return answer
        before = drop_reply(record)
        if not before.messages or before.messages[-1].role not in ("user", "tool"):
            message = "There is nothing to answer: the session ends with no user or tool message, answered or not."
            raise bad_request(message, code="nothing_to_answer")
        prompt = await context.tokens.run(regeneration_prompt, body, context.tokens, context.facts, before)
        old = record.messages[-1]
        if old.begun and prompt.ids == before.tokens:  # which end with what its client began the reply with
            prompt = replace(prompt, reply_start=old.content[: old.begun])
        return await run_chat(turn, body, prompt)


async def cancel_turn(session_id: str, request: Request) -> Response:
    """Stop the running turn and commit what it has generated, with its KV and the finish reason `cancelled`. A turn
    that has generated nothing is not committed. The request is answered when the turn has ended."""
    context, session = context_of(request), session_of_path(request, session_id)
    over = context.log.end_of_hold(session.tenant, session.name)
    if over is None:
        async with context.log.holding(session.tenant, session.name):  # no other server runs one either
            await require_session(context, session)
        return json_response(objects.SessionCancelled(session.name, False))
    cancelled, until = False, time.monotonic() + CANCEL_SECONDS
    while not over.is_set() and time.monotonic() < until:
        cancelled = cancelled or context.engine.cancel(session.tenant, session.name)  # it may be about to be submitted
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), NUDGE_SECONDS)
    if not over.is_set() and not cancelled:
        raise SessionBusy
    return json_response(objects.SessionCancelled(session.name, cancelled))


# Clients send no body: it is not read.
router.add_api_route("/v1/sessions/{session_id}/cancel", cancel_turn, methods=["POST"], route_class_override=APIRoute)


@router.delete("/v1/sessions/{session_id}")
async def delete_session(session_id: str, request: Request) -> Response:
    """Delete the session for good. A running turn ends with an error."""
    session = session_of_path(request, session_id)
    if not await delete_session_and_turn(context_of(request), session):
        raise UnknownSession
    return json_response(DeletedObject("session.deleted", session.name))


async def delete_session_and_turn(context: ServerContext, session: Session) -> bool:
    """Delete a session, its running turn and its KV; False if there was none."""
    ending = None
    try:
        with context.log.claim(session.tenant, session.name):
            pass
    except SessionBusy:
        ending = asyncio.create_task(keep_ending_turn(context, session))
    try:
        async with context.log.claim_when_free(session.tenant, session.name, DELETE_SECONDS) as elsewhere:
            existed = await delete_held_session(context, session)
    finally:
        if ending is not None:
            ending.cancel()
    return existed or elsewhere or ending is not None


async def delete_held_session(context: ServerContext, session: Session) -> bool:
    """The same for a session that the caller holds."""
    life = await context.log.delete(session.tenant, session.name)
    context.engine.forget(session.tenant, session.name, life)
    return life is not None


async def keep_ending_turn(context: ServerContext, session: Session) -> None:
    """End the session's turn again and again until cancelled, as it may not have been submitted yet."""
    while True:
        context.engine.forget(session.tenant, session.name)
        await asyncio.sleep(NUDGE_SECONDS)
