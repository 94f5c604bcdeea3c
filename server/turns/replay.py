"""Replay of turns by ``Idempotency-Key``: a repeated request is answered from the log."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import AsyncGenerator, Callable
from typing import get_args

from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from scheduler.protocol import Delta
from server.chat.chat_tokenizer import ChatTokenizer
from server.chat.partial_reply import FinishedReply, PartialReply
from server.errors import ApiError, bad_request
from server.http.sse import EventStream
from server.log.identity import Session
from server.log.logged_message import LoggedMessage
from server.log.retries import CommittedTurn, Idempotency
from server.schemas.objects import CachedTokens, CompletionTokens, Finish, Usage
from server.schemas.requests import TurnRequest
from server.turns.context import ServerContext, headers_of
from server.turns.replies import Reply, encoder

HEADER = "idempotency-key"
KEY = re.compile(r"[\x21-\x7e]{1,255}\Z")
HOW_ONLY = {
    "stream",
    "stream_options",
    "background",
    "session_id",
}  # fields that leave the turn what it is; the session is the key's


def idempotency_of(request: Request, body: TurnRequest) -> Idempotency | None:
    """The client's idempotency key, with a hash of the request; None if it sent none. Raises a 400."""
    keys = request.headers.getlist(HEADER)
    if not keys:
        return None
    if len(keys) > 1 or not KEY.match(keys[0]):
        message = "Idempotency-Key has 1 to 255 visible ASCII characters, and is sent once."
        raise bad_request(message, "Idempotency-Key", "invalid_idempotency_key")
    # Without defaults, so that a field that a later version adds does not change the hash of the same request.
    asked = json.dumps(body.model_dump(mode="json", exclude=HOW_ONLY, exclude_defaults=True), sort_keys=True)
    return Idempotency(keys[0], hashlib.sha256(asked.encode()).hexdigest())


async def replay_turn(
    context: ServerContext,
    session: Session,
    idempotency: Idempotency,
    stream: bool,
    make_reply: Callable[[int], Reply],
) -> Response | None:
    """The answer of the turn that was committed under an idempotency key; None if there is none. ``make_reply`` makes
    the endpoint's reply for a creation time in Unix seconds. The session must be claimed, so that no first attempt is
    still running. Raises a 422 if the key belongs to another request.
    """
    found = await context.log.replay(session.tenant, session.name, idempotency.key)
    if found is None:
        return None
    if found.request_hash != idempotency.request_hash:
        raise idempotency_key_reused()
    reply = make_reply(found.created)
    headers = {**headers_of(session), "idempotent-replayed": "true"}
    said = found.reply.content[found.reply.begun :]
    partial_reply = PartialReply(FinishedReply(structs.replace(found.reply, content=said)))
    usage = _usage(found, await context.tokens.run(count_reasoning_tokens, context.tokens, found.reply))
    if stream:
        events = _events(reply, partial_reply, usage, found)
        return EventStream(events, lambda: None, headers, done=reply.done, failed=reply.encode_failure)
    partial_reply.add(Delta(""))
    partial_reply.finish = _finish(found)
    answer = encoder.encode(reply.write_body([partial_reply], usage, None))
    return Response(answer, headers=headers, media_type="application/json")


def idempotency_key_reused() -> ApiError:
    """422: the key belongs to another request."""
    message = "This Idempotency-Key was used for another request on this session."
    return ApiError(422, message, param="Idempotency-Key", code="idempotency_key_reused")


async def _events(
    reply: Reply, partial_reply: PartialReply, usage: Usage, found: CommittedTurn
) -> AsyncGenerator[bytes]:
    """A stream of one piece. Its receipt is null: nothing was computed."""
    delta = Delta("", text=found.reply.content)
    field = usage if reply.usage_options.everywhere else reply.usage_options.elsewhere
    parts = partial_reply.add(delta)
    partial_reply.finish = _finish(found)
    for chunk in (
        *reply.open_choice(0, field),
        *reply.write_delta(0, delta, parts, field),
        *reply.end_choice(0, partial_reply, field, None),
        *reply.end_stream([partial_reply], usage, None),
    ):
        yield reply.encode_event(chunk)


def _usage(found: CommittedTurn, reasoning: int) -> Usage:
    prompt, completion = found.prompt_tokens, found.completion_tokens
    details = CompletionTokens(min(reasoning, completion))
    return Usage(prompt, completion, prompt + completion, CachedTokens(found.cached), details)


def count_reasoning_tokens(tokens: ChatTokenizer, reply: LoggedMessage) -> int:
    """How many tokens the reasoning of a reply has. Blocking."""
    return len(tokens.encode(reply.reasoning_content, special=False))


def _finish(found: CommittedTurn) -> Finish:
    """As it was committed."""
    return next((reason for reason in get_args(Finish) if reason == found.finish_reason), "stop")
