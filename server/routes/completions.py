"""Text completions: prompts as they are, without a template."""

from __future__ import annotations

import uuid
from contextlib import ExitStack

from fastapi import APIRouter, Request
from starlette.responses import Response

from scheduler.messages import Submit, pack_ids
from server.body import JsonRoute
from server.exchange import Exchange
from server.face import face_of
from server.identity import named_session
from server.prompts import completion_prompts, fed, room
from server.replies import CompletionReply, Head
from server.schemas import CompletionRequest

router = APIRouter(route_class=JsonRoute)
DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint only


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continuations of one or several prompts; with a session id, of that session's text."""
    face = face_of(request)
    session = named_session(request, body.session_id)
    name = session.name if session else None
    facts = face.check(body, session, choices=body.n * len(body.prompts))
    with ExitStack() as held:
        record = await face.open(session, held)
        prompts = await face.tokens.run(completion_prompts, body, face.tokens, facts, record)
        submits = []
        for prompt in prompts:
            room(prompt, body, facts, "prompt")
            ids = pack_ids(prompt.ids)
            left = facts.max_context - fed(prompt, facts)
            # Without max_tokens, min_tokens may ask for more than the default gives.
            limit = body.token_limit
            if limit is None:
                limit = min(max(DEFAULT_MAX_TOKENS, body.min_tokens), left)
            submits += [
                Submit(
                    turn=uuid.uuid4().hex,
                    tenant=request.state.tenant,
                    prompt=ids,
                    session=name,
                    sampling=body.sampling(choice),
                    stopping=body.stopping(limit),
                    logprobs=body.token_logprobs,
                    prompt_logprobs=body.token_logprobs if body.echo else None,
                )
                for choice in range(body.n)
            ]
        head = Head.new("cmpl", face.served_name, facts.fingerprint, name)
        per_choice = [prompt for prompt in prompts for _ in range(body.n)]
        reply = CompletionReply(head, per_choice, body.echo, body.logprobs is not None)
        return await Exchange(face, body, session, prompts, submits, reply).respond(request, held)
