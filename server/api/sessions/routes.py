"""Sessions: made, listed, looked at, changed, forked, rewound, edited, answered anew, deleted.

Every verb that needs the timeline to stand still holds the session while it runs, so a running turn and a verb never
mix: the later one is a 409. Looking and updating need no hold, and a deletion ends the turn and waits for it.
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

from server.api.openai.chat import answer, chat_replay
from server.api.sessions import objects as objects
from server.api.sessions.objects import body_of, seen, session_object
from server.api.sessions.schemas import (
    CreateSession,
    EditMessage,
    ForkSession,
    ListSessions,
    RewindSession,
    UpdateSession,
)
from server.chat.cutting import cut_reply
from server.chat.prompts import check_bytes, same_prompt
from server.errors import ApiError, bad_request
from server.http.body import JsonRoute
from server.log.identity import Session, named_session
from server.log.session_log import (
    NoSuchPlace,
    SessionBusy,
    SessionRecord,
    UnknownSession,
    drop_reply,
)
from server.schemas.messages import check_calls
from server.schemas.requests import INT32, ReplyRequest
from server.turns.face import Face, face_of
from server.turns.replay import replayed

router = APIRouter(route_class=JsonRoute)
DELETE_SECONDS = CANCEL_SECONDS = 10.0  # for a running turn to end once it was told to
NUDGE_SECONDS = 0.25  # a turn that was just about to start is told again


def named(request: Request, session_id: str) -> Session:
    """The session of the path. Raises a 400 for what no session is called."""
    session = named_session(request, None, session_id)
    assert session is not None
    return session


def new_id() -> str:
    """An id for a session whose client gave none."""
    return f"sess_{uuid.uuid4().hex}"


async def found(face: Face, session: Session) -> SessionRecord:
    """What the log holds of it. Raises UnknownSession, also for a foreign one."""
    record = await face.log.get(session.tenant, session.name)
    if record is None:
        raise UnknownSession
    return record


@contextmanager
def places() -> Iterator[None]:
    """A turn, token or message that is not there, as the client hears it."""
    try:
        yield
    except NoSuchPlace as error:
        if error.param == "index":
            raise ApiError(404, "There is no such message.", param="index", code="message_not_found") from None
        message = f"{error.param} can be at most {error.last} in this session."
        raise bad_request(message, error.param, "invalid_value") from None


@router.post("/v1/sessions", status_code=201)
async def create_session(body: CreateSession, request: Request) -> Response:
    """A session before its first turn, with a past to begin from."""
    face = face_of(request)
    messages = [message.plain() for message in body.messages]
    check_calls([], messages)
    if face.engine.facts is not None:
        check_bytes((m["content"] for m in messages), face.engine.facts, "messages")
    session = Session(request.state.tenant, body.id or new_id(), stateful=True)
    until = pinned_until(body.pin_seconds)
    async with face.log.holding(session.tenant, session.name):
        summary = await face.log.create(
            session.tenant,
            session.name,
            messages=messages,
            metadata=body.metadata,
            ttl=body.ttl_seconds,
            pinned_until=until,
        )
        if until is not None:
            face.engine.pin(session.tenant, session.name, until)
        return body_of(await seen(face, session, summary), 201)


def pinned_until(seconds: int) -> int | None:
    """The end of a pin that begins now; None for no seconds."""
    return int(time.time()) + seconds if seconds else None


@router.get("/v1/sessions")
async def list_sessions(query: Annotated[ListSessions, Query()], request: Request) -> Response:
    """A page of the tenant's sessions."""
    face = face_of(request)
    try:
        page = await face.log.list(
            request.state.tenant,
            limit=query.limit,
            after=query.after,
            descending=query.order == "desc",
            metadata=query.metadata,
            prefix=query.prefix,
            used_after=query.used_after,
            used_before=query.used_before,
        )
    except UnknownSession:
        raise ApiError(404, "There is no such session.", param="after", code="session_not_found") from None
    data = [session_object(face, item) for item in page.items]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return body_of(objects.SessionList(data, first, last, page.has_more))


@router.get("/v1/sessions/{session_id}")
async def retrieve_session(session_id: str, request: Request) -> Response:
    """All about one session but its text."""
    face, session = face_of(request), named(request, session_id)
    summary = await face.log.summary(session.tenant, session.name)
    if summary is None:
        raise UnknownSession
    return body_of(await seen(face, session, summary))


@router.get("/v1/sessions/{session_id}/turns")
async def list_turns(session_id: str, request: Request) -> Response:
    """The turns of the current timeline."""
    record = await found(face_of(request), named(request, session_id))
    return body_of(objects.TurnList(objects.turn_objects(record)))


@router.get("/v1/sessions/{session_id}/tree")
async def retrieve_tree(session_id: str, request: Request) -> Response:
    """The session with all that shares a past with it: the turns of each, what they cost, where the cache is."""
    face, session = face_of(request), named(request, session_id)
    family = await face.log.family(session.tenant, session.name)
    found = await asyncio.gather(*(objects.branch(face, session.tenant, member) for member in family.members))
    branches = [branch for branch in found if branch is not None]
    return body_of(objects.SessionTree(family.root, branches, family.has_more))


@router.get("/v1/sessions/{session_id}/messages")
async def list_messages(session_id: str, request: Request) -> Response:
    """The messages of the current timeline."""
    record = await found(face_of(request), named(request, session_id))
    return body_of(objects.MessageList(objects.message_objects(record)))


@router.post("/v1/sessions/{session_id}")
async def update_session(session_id: str, body: UpdateSession, request: Request) -> Response:
    """Other metadata, another end, a pin; a turn may be running."""
    face, session = face_of(request), named(request, session_id)
    until = UNSET if body.pin_seconds is None else pinned_until(body.pin_seconds)
    summary = await face.log.update(
        session.tenant,
        session.name,
        metadata=UNSET if body.metadata is None else body.metadata,
        ttl=body.ttl_seconds if body.sets_ttl else UNSET,
        pinned_until=until,
    )
    if until is not UNSET:  # at once: pins reach the engine in the order of the log
        face.engine.pin(session.tenant, session.name, until or 0)
    return body_of(await seen(face, session, summary))


@router.post("/v1/sessions/{session_id}/fork", status_code=201)
async def fork_session(session_id: str, body: ForkSession, request: Request) -> Response:
    """A new session with the same past, whose cache is shared as long as it is the same."""
    face, session = face_of(request), named(request, session_id)
    new = Session(session.tenant, body.id or new_id(), stateful=True)
    with ExitStack() as held:
        await face.log.hold(session.tenant, session.name, held)
        if new != session:  # then the log says that it exists
            await face.log.hold(new.tenant, new.name, held)
        with places():
            summary = await face.log.fork(session.tenant, session.name, new.name, turn=body.turn)
        return body_of(await seen(face, new, summary), 201)


@router.post("/v1/sessions/{session_id}/rewind")
async def rewind_session(session_id: str, body: RewindSession, request: Request) -> Response:
    """Back to the end of a turn, or to a token."""
    face, session = face_of(request), named(request, session_id)
    async with face.log.holding(session.tenant, session.name):
        reply = expect = None
        with places():
            if body.tokens is not None:
                record = await found(face, session)
                reply = await face.tokens.run(cut_reply, face.tokens, record, body.tokens)
                expect = record.version
            summary = await face.log.rewind(
                session.tenant, session.name, turn=body.turn, tokens=body.tokens, reply=reply, expect=expect
            )
        return body_of(await seen(face, session, summary))


@router.put("/v1/sessions/{session_id}/messages/{index}")
async def edit_message(
    session_id: str, index: Annotated[int, PathParameter(ge=0, le=INT32)], body: EditMessage, request: Request
) -> Response:
    """Another content for a message. What came behind it is dropped, and the next turn reads the new one."""
    face, session = face_of(request), named(request, session_id)
    if face.engine.facts is not None:
        check_bytes([body.text], face.engine.facts, "content")
    async with face.log.holding(session.tenant, session.name):
        with places():
            summary = await face.log.edit(session.tenant, session.name, index, body.text)
        return body_of(await seen(face, session, summary))


@router.post("/v1/sessions/{session_id}/regenerate")
async def regenerate(session_id: str, body: ReplyRequest, request: Request) -> Response:
    """Another reply to the last user message, from the very same prompt. The old one stays until this one is
    committed."""
    face, session = face_of(request), named_session(request, body.session_id, session_id)
    assert session is not None
    facts = face.check(body, session, choices=body.n)
    with ExitStack() as held:
        record = await face.open(session, held)
        if record is None:
            raise UnknownSession
        if (again := await replayed(request, body, face, session, chat_replay(body, face, session))) is not None:
            return again
        before = drop_reply(record)
        if not before.messages or before.messages[-1]["role"] not in ("user", "tool"):
            message = "There is nothing to answer: the session ends with no user or tool message, answered or not."
            raise bad_request(message, code="nothing_to_answer")
        prompt = await face.tokens.run(same_prompt, body, face.tokens, facts, before)
        old = record.messages[-1]
        if old.get("begun") and prompt.ids == before.tokens:  # which end with what its client began the reply with
            prompt = replace(prompt, said=old["content"][: old["begun"]])
        return await answer(body, request, face, session, record, prompt, held)


async def cancel_turn(session_id: str, request: Request) -> Response:
    """Stop the turn that runs. What it said so far is committed with its KV, under the finish reason `cancelled`, which
    its client is told too; one that has said nothing is not a turn. Answered when it is over."""
    face, session = face_of(request), named(request, session_id)
    over = face.log.end_of_hold(session.tenant, session.name)
    if over is None:
        async with face.log.holding(session.tenant, session.name):  # no other server runs one either
            await found(face, session)
        return body_of(objects.SessionCancelled(session.name, False))
    cancelled, until = False, time.monotonic() + CANCEL_SECONDS
    while not over.is_set() and time.monotonic() < until:
        cancelled = cancelled or face.engine.cancel(session.tenant, session.name)  # it may be about to be submitted
        with suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), NUDGE_SECONDS)
    if not over.is_set() and not cancelled:
        raise SessionBusy
    return body_of(objects.SessionCancelled(session.name, cancelled))


# Clients send no body: it is not read.
router.add_api_route("/v1/sessions/{session_id}/cancel", cancel_turn, methods=["POST"], route_class_override=APIRoute)


@router.delete("/v1/sessions/{session_id}")
async def delete_session(session_id: str, request: Request) -> Response:
    """Remove it for ever. A running turn ends as cancelled."""
    session = named(request, session_id)
    if not await end_session(face_of(request), session):
        raise UnknownSession
    return body_of(objects.SessionDeleted(session.name))


async def end_session(face: Face, session: Session) -> bool:
    """Remove a session, its turn and its cache; False if there was nothing of it."""
    ending = None
    try:
        with face.log.claim(session.tenant, session.name):
            pass
    except SessionBusy:
        ending = asyncio.create_task(end_turn(face, session))
    try:
        async with face.log.claim_when_free(session.tenant, session.name, DELETE_SECONDS) as elsewhere:
            existed = await end_held(face, session)
    finally:
        if ending is not None:
            ending.cancel()
    return existed or elsewhere or ending is not None


async def end_held(face: Face, session: Session) -> bool:
    """The same for one that the caller holds."""
    life = await face.log.delete(session.tenant, session.name)
    face.engine.forget(session.tenant, session.name, life)
    return life is not None


async def end_turn(face: Face, session: Session) -> None:
    """Tell the engine again and again: the turn may be about to be submitted."""
    while True:
        face.engine.forget(session.tenant, session.name)
        await asyncio.sleep(NUDGE_SECONDS)
