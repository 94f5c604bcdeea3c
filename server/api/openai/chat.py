"""Chat completions, stateless and on a session."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from scheduler.protocol import Submit, pack_ids
from server.api.openai.stored_chats import BEGUN, asked, sent
from server.chat.bad_words import banned
from server.chat.partial_reply import PartialReply
from server.chat.prompts import Prompt, chat_prompt, room
from server.chat.tool_prompts import calls_of, is_read, reply_grammar
from server.errors import bad_request
from server.http.body import JsonRoute
from server.log.identity import Session, named_session
from server.log.retries import Idempotency
from server.log.timeline import SessionRecord
from server.schemas.requests import ChatRequest, ReplyRequest
from server.schemas.vendor_fields import NO_WISH, TokenOptions
from server.turns.context import ServerContext, context_of
from server.turns.replay import idempotency_of, replayed
from server.turns.replies import ChatReply, Reply, ReplyHead, UsageOptions
from server.turns.turn_runner import TurnRunner

router = APIRouter(route_class=JsonRoute)
Kept = tuple[dict[str, Any], list[dict[str, Any]]]  # of a chat that is stored: how it was asked for, what was sent
Writer = Callable[[ReplyHead, bool], Reply]  # from a head, and whether the turn is replayed from the log


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Generate a reply to a whole conversation, or with ``session_id`` to the new messages of a session. A chat with
    ``store`` and without a session begins one; a stored chat can be listed and fetched."""
    session = named_session(request, body.session_id)
    if session is None and body.store:
        session = Session(request.state.tenant, f"{BEGUN}{uuid.uuid4().hex}", stateful=False)
    return await chat(body, request, session)


@router.post("/v1/sessions/{session_id}/chat/completions")
async def continue_chat(session_id: str, body: ChatRequest, request: Request) -> Response:
    """Generate a reply to the new messages of a session; an unknown id begins a session."""
    return await chat(body, request, named_session(request, body.session_id, session_id))


async def chat(body: ChatRequest, request: Request, session: Session | None, writer: Writer | None = None) -> Response:
    """Render, then answer in the words of ``writer``; None: as a chat completion."""
    context = context_of(request)
    facts = context.check(body, session, choices=body.n)
    if body.metadata and session is None:
        raise bad_request("metadata is kept with a session: it needs one, or store: true.", "metadata", "invalid_value")
    with ExitStack() as held:
        record = await context.open(session, held)
        kept = await kept_id(context, body, session, idempotency_of(request, body))
        again = await replayed(request, body, context, session, chat_replay(body, context, session, writer, kept))
        if again is not None:
            return again
        base = record if session is not None and session.stateful else None
        prompt = await context.tokens.run(chat_prompt, body, context.tokens, facts, base)
        return await answer(body, request, context, session, record, prompt, held, writer)


async def answer(
    body: ReplyRequest,
    request: Request,
    context: ServerContext,
    session: Session | None,
    record: SessionRecord | None,
    prompt: Prompt,
    held: ExitStack,
    writer: Writer | None = None,
) -> Response:
    """Run one turn per choice on ``prompt`` and reply; a session with a name is committed as ``prompt`` and its reply.

    ``record`` is what the log holds of ``session`` now (None: nothing), whether or not the prompt builds on it: the
    commit fails with SessionMoved if the log is further by then, and the receipt tells what of it could not be
    reused. ``held`` holds the session's claim, and is emptied here: the claim lasts until the response is over.
    The turn is committed under the request's ``Idempotency-Key``; whether it was already is for the caller to ask
    (``replayed``), before it makes a prompt.
    Raises a 400 when the prompt leaves no room for a reply, and whatever refuses the turn.
    """
    facts = context.facts
    name = session.name if session else None
    limit = room(prompt, body, facts, "messages")
    calls = calls_of(prompt.rendering.tools, body.tool_choice, body.parallel_tool_calls)
    dialect = context.tokens.dialect
    grammar = await reply_grammar(body, calls, prompt.tail, context.tokens, context.grammars)
    if body.bad_words and grammar is not None:
        message = "bad_words cannot be used where a format or calls of tools decide which words may come."
        raise bad_request(message, "bad_words", "invalid_value")
    words = await context.tokens.run(banned, body.bad_words, context.tokens, facts.vocab_size) if body.bad_words else ()
    # A reply whose first word a format shapes, or that goes on with one, thinks no more.
    reasons = not prompt.said and (body.wanted() is None or calls.constrained)
    ids, salt = pack_ids(prompt.ids), body.salt
    drafts, submits = [], []
    for choice in range(body.n):  # not in comprehensions, whose cells would live as long as this waits
        drafts.append(PartialReply(dialect.reading(prompt.tail, calls, reasons=reasons)))
        submit = Submit(
            turn=uuid.uuid4().hex,
            tenant=request.state.tenant,
            prompt=ids,
            session=name,
            sampling=body.sampling(choice, facts.generation, words),
            stopping=body.stopping(limit, facts.generation),
            logprobs=body.token_logprobs,
            prompt_logprobs=body.prompt_logprobs if choice == 0 else None,
            grammar=grammar,
            special=is_read(dialect, calls, reasons=reasons) or not body.skip_special_tokens,
            salt=salt,
            keep_until=body.keep_until,
        )
        submits.append(submit)
    head = ReplyHead.new("chatcmpl", context.served_name, facts.fingerprint, name)
    kept = None
    if body.store:
        kept = asked(body, submits[0].sampling, request.state.request_id), sent(body, prompt.messages)
    reply = (writer or chat_writer(body, prompt, kept))(head, False)
    key = idempotency_of(request, body)
    return await TurnRunner(context, body, session, record, [prompt], submits, reply, key, drafts).respond(
        request, held
    )


def chat_writer(body: ReplyRequest, prompt: Prompt | None = None, kept: Kept | None = None) -> Writer:
    """Chat completions; without tokens and logprobs where they are replayed (``prompt`` None), as the log does not tell
    them."""
    tokens = NO_WISH if prompt is None else TokenOptions.of(body, body.token_logprobs)
    made = partial(ChatReply, wish=UsageOptions.of(body), tokens=tokens, prompt=prompt, echo=body.echoed)
    return lambda head, replayed: made(head, tier=body.service_tier, metadata=body.metadata, kept=kept)


def chat_replay(
    body: ReplyRequest,
    context: ServerContext,
    session: Session | None,
    writer: Writer | None = None,
    id: str | None = None,
) -> Callable[[int], Reply]:
    """The objects of a replayed chat, for ``replayed``. ``id``: that of the stored one."""
    name = session.name if session else None
    fingerprint = context.facts.fingerprint

    def reply(created: int) -> Reply:
        head = ReplyHead.new("chatcmpl", context.served_name, fingerprint, name, created)
        return (writer or chat_writer(body))(head if id is None else replace(head, id=id), True)

    return reply


async def kept_id(
    context: ServerContext, body: ReplyRequest, session: Session | None, key: Idempotency | None
) -> str | None:
    """The id of the chat that was stored under an idempotency key; None where there is none."""
    if session is None or key is None or not body.store:
        return None
    found = await context.log.responses.of_key(session.tenant, session.name, key.key)
    stored = None if found is None else found[1]
    return None if stored is None else str(json.loads(stored.body)["id"])
