"""Text completions: prompts as they are, without a template."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import ExitStack

from fastapi import APIRouter, Request
from starlette.responses import Response

from scheduler.protocol import Submit, pack_ids
from server.chat.bad_words import banned
from server.chat.prompts import Prompt, completion_prompts, fed, room
from server.errors import bad_request
from server.http.body import JsonRoute
from server.log.identity import Session, named_session
from server.schemas.completion_requests import CompletionRequest
from server.schemas.formats import format_grammar
from server.schemas.vendor_fields import TokenWish
from server.turns.completion_reply import CompletionReply
from server.turns.exchange import Exchange
from server.turns.face import Face, face_of
from server.turns.replay import idempotency_of, replayed
from server.turns.replies import Head, Reply, UsageWish

router = APIRouter(route_class=JsonRoute)
DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint only


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continuations of one or several prompts; with a session id, of that session's text."""
    face = face_of(request)
    session = named_session(request, body.session_id)
    name = session.name if session else None
    facts = face.check(body, session, choices=body.candidates * len(body.prompts))
    with ExitStack() as held:
        record = await face.open(session, held)
        if (again := await replayed(request, body, face, session, completion_replay(body, face, session))) is not None:
            return again
        base = record if session is not None and session.stateful else None
        prompts = await face.tokens.run(completion_prompts, body, face.tokens, facts, base)
        for prompt in prompts:
            room(prompt, body, facts, "prompt")
        grammar = await format_grammar(body, face.grammars)
        if body.bad_words and grammar is not None:
            message = "bad_words cannot be used where a format decides which words may come."
            raise bad_request(message, "bad_words", "invalid_value")
        words = await face.tokens.run(banned, body.bad_words, face.tokens, facts.vocab_size) if body.bad_words else ()
        salt = body.salt
        submits = [
            Submit(
                turn=uuid.uuid4().hex,
                tenant=request.state.tenant,
                prompt=pack_ids(prompt.ids),
                session=name,
                sampling=body.sampling(choice, facts.generation, words),
                stopping=body.stopping(limit(body, facts.max_context - fed(prompt, facts)), facts.generation),
                logprobs=0 if body.candidates > body.n and body.token_logprobs is None else body.token_logprobs,
                prompt_logprobs=body.prompt_alternatives,
                grammar=grammar,
                special=not body.skip_special_tokens,
                salt=salt,
                keep_until=body.keep_until,
            )
            for prompt in prompts
            for choice in range(body.candidates)
        ]
        head = Head.new("cmpl", face.served_name, facts.fingerprint, name)
        per_choice = [prompt for prompt in prompts for _ in range(body.candidates)]
        best = (body.n, body.candidates)
        tokens = TokenWish.of(body, body.token_logprobs)
        reply = CompletionReply(head, UsageWish.of(body), per_choice, body.echo, tokens, best)
        key = idempotency_of(request, body)
        return await Exchange(face, body, session, record, prompts, submits, reply, key).respond(request, held)


def limit(body: CompletionRequest, left: int) -> int:
    """The most tokens to generate, where ``left`` fit the context."""
    if body.token_limit is not None:
        return body.token_limit
    # Without max_tokens, min_tokens may ask for more than the default gives.
    return min(max(DEFAULT_MAX_TOKENS, body.min_tokens), left)


def completion_replay(body: CompletionRequest, face: Face, session: Session | None) -> Callable[[int], Reply]:
    """The objects of a replayed completion, for ``replayed``: without logprobs, which the log does not hold."""
    name = session.name if session else None
    fingerprint = face.facts.fingerprint

    def reply(created: int) -> Reply:
        given = body.prompts[0]  # a session takes one
        prompt = Prompt([], echo=given if isinstance(given, str) else face.tokens.decode(given))
        head = Head.new("cmpl", face.served_name, fingerprint, name, created)
        return CompletionReply(head, UsageWish.of(body), [prompt], body.echo)

    return reply
