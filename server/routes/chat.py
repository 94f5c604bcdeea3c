"""Chat completions, stateless and on a session."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import ExitStack

from fastapi import APIRouter, Request
from starlette.responses import Response

from scheduler.messages import Submit, pack_ids
from server.body import JsonRoute
from server.exchange import Exchange
from server.face import Face, face_of
from server.identity import Session, named_session
from server.log import SessionRecord
from server.prompts import Prompt, chat_prompt, room
from server.replay import idempotency_of, replayed
from server.replies import ChatReply, Head, Reply, UsageWish
from server.schemas import ChatRequest, ReplyRequest

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """The reply to a whole conversation, or with ``session_id`` to what is new in one."""
    return await chat(body, request, named_session(request, body.session_id))


@router.post("/v1/sessions/{session_id}/chat/completions")
async def continue_chat(session_id: str, body: ChatRequest, request: Request) -> Response:
    """The reply to what is new in a session; an unknown one begins here."""
    return await chat(body, request, named_session(request, body.session_id, session_id))


async def chat(body: ChatRequest, request: Request, session: Session | None) -> Response:
    """Render, then answer."""
    face = face_of(request)
    facts = face.check(body, session, choices=body.n)
    with ExitStack() as held:
        record = await face.open(session, held)
        if (again := await replayed(request, body, face, session, chat_replay(body, face, session))) is not None:
            return again
        base = record if session is not None and session.stateful else None
        prompt = await face.tokens.run(chat_prompt, body, face.tokens, facts, base)
        return await answer(body, request, face, session, record, prompt, held)


async def answer(
    body: ReplyRequest,
    request: Request,
    face: Face,
    session: Session | None,
    record: SessionRecord | None,
    prompt: Prompt,
    held: ExitStack,
) -> Response:
    """Run one turn per choice on ``prompt`` and reply; a session with a name is committed as ``prompt`` and its reply.

    ``record`` is what the log holds of ``session`` now (None: nothing), whether or not the prompt builds on it: the
    commit fails with SessionMoved if the log is further by then, and the receipt tells what of it could not be
    reused. ``held`` holds the session's claim, and is emptied here: the claim lasts until the response is over.
    The turn is committed under the request's ``Idempotency-Key``; whether it was already is for the caller to ask
    (``replayed``), before it makes a prompt.
    Raises a 400 when the prompt leaves no room for a reply, and whatever refuses the turn.
    """
    facts = face.facts
    name = session.name if session else None
    room(prompt, body, facts, "messages")
    ids = pack_ids(prompt.ids)
    submits = [
        Submit(
            turn=uuid.uuid4().hex,
            tenant=request.state.tenant,
            prompt=ids,
            session=name,
            sampling=body.sampling(choice),
            stopping=body.stopping(body.token_limit),
            logprobs=body.token_logprobs,
        )
        for choice in range(body.n)
    ]
    head = Head.new("chatcmpl", face.served_name, facts.fingerprint, name)
    reply = ChatReply(head, UsageWish.of(body), body.logprobs)
    key = idempotency_of(request, body)
    return await Exchange(face, body, session, record, [prompt], submits, reply, key).respond(request, held)


def chat_replay(body: ReplyRequest, face: Face, session: Session | None) -> Callable[[int], Reply]:
    """The objects of a replayed chat, for ``replayed``: without logprobs, which the log does not hold."""
    name = session.name if session else None
    fingerprint = face.facts.fingerprint

    def reply(created: int) -> Reply:
        head = Head.new("chatcmpl", face.served_name, fingerprint, name, created)
        return ChatReply(head, UsageWish.of(body), logprobs=False)

    return reply
