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
from server.schemas.vendor_fields import TokenOptions
from server.turns.completion_reply import CompletionReply
from server.turns.context import ServerContext, context_of
from server.turns.replay import idempotency_of, replayed
from server.turns.replies import Reply, ReplyHead, UsageOptions
from server.turns.turn_runner import TurnRunner

router = APIRouter(route_class=JsonRoute)
DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint only


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Complete one or several prompts; with a session id, continue that session's text."""
    context = context_of(request)
    session = named_session(request, body.session_id)
    name = session.name if session else None
    facts = context.check(body, session, choices=body.candidates * len(body.prompts))
    with ExitStack() as held:
        record = await context.open(session, held)
        if (
            again := await replayed(request, body, context, session, completion_replay(body, context, session))
        ) is not None:
            return again
        base = record if session is not None and session.stateful else None
        prompts = await context.tokens.run(completion_prompts, body, context.tokens, facts, base)
        for prompt in prompts:
            room(prompt, body, facts, "prompt")
        grammar = await format_grammar(body, context.grammars)
        if body.bad_words and grammar is not None:
            message = "bad_words cannot be used where a format decides which words may come."
            raise bad_request(message, "bad_words", "invalid_value")
        words = (
            await context.tokens.run(banned, body.bad_words, context.tokens, facts.vocab_size) if body.bad_words else ()
        )
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
        head = ReplyHead.new("cmpl", context.served_name, facts.fingerprint, name)
        per_choice = [prompt for prompt in prompts for _ in range(body.candidates)]
        best = (body.n, body.candidates)
        tokens = TokenOptions.of(body, body.token_logprobs)
        reply = CompletionReply(head, UsageOptions.of(body), per_choice, body.echo, tokens, best)
        key = idempotency_of(request, body)
        return await TurnRunner(context, body, session, record, prompts, submits, reply, key).respond(request, held)


def limit(body: CompletionRequest, left: int) -> int:
    """The most tokens to generate, where ``left`` fit the context."""
    if body.token_limit is not None:
        return body.token_limit
    # Without max_tokens, min_tokens may ask for more than the default gives.
    return min(max(DEFAULT_MAX_TOKENS, body.min_tokens), left)


def completion_replay(
    body: CompletionRequest, context: ServerContext, session: Session | None
) -> Callable[[int], Reply]:
    """The objects of a replayed completion, for ``replayed``: without logprobs, which the log does not hold."""
    name = session.name if session else None
    fingerprint = context.facts.fingerprint

    def reply(created: int) -> Reply:
        given = body.prompts[0]  # a session takes one
        prompt = Prompt([], echo=given if isinstance(given, str) else context.tokens.decode(given))
        head = ReplyHead.new("cmpl", context.served_name, fingerprint, name, created)
        return CompletionReply(head, UsageOptions.of(body), [prompt], body.echo)

    return reply
