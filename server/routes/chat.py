"""Chat completions, stateless and on a session."""

from __future__ import annotations

import uuid
from contextlib import ExitStack

from fastapi import APIRouter, Request
from starlette.responses import Response

from scheduler.messages import Submit, pack_ids
from server.body import JsonRoute
from server.exchange import Exchange
from server.face import face_of
from server.identity import Session, named_session
from server.prompts import chat_prompt, room
from server.replies import ChatReply, Head
from server.schemas import ChatRequest

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
    """Render, submit one turn per choice, reply."""
    face = face_of(request)
    name = session.name if session else None
    facts = face.check(body, session, choices=body.n)
    with ExitStack() as held:
        record = await face.open(session, held)
        prompt = await face.tokens.run(chat_prompt, body, face.tokens, facts, record)
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
        reply = ChatReply(head, body.logprobs)
        return await Exchange(face, body, session, [prompt], submits, reply).respond(request, held)
