"""Retries: a turn that carries an ``Idempotency-Key`` runs once; whoever asks again is answered from the log."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import AsyncGenerator, Callable

from starlette.requests import Request
from starlette.responses import Response

from scheduler.messages import Delta
from server.draft import Draft
from server.errors import ApiError, bad_request
from server.face import Face, headers_of
from server.identity import Session
from server.log import Idempotency, Replayed
from server.objects import CachedTokens, Finish, Usage
from server.replies import Reply, encoder
from server.schemas import GenerationRequest
from server.sse import EventStream

HEADER = "idempotency-key"
KEY = re.compile(r"[\x21-\x7e]{1,255}\Z")
HOW_ONLY = {"stream", "stream_options", "session_id"}  # fields that leave the turn what it is; the session is the key's


def idempotency_of(request: Request, body: GenerationRequest) -> Idempotency | None:
    """The key that the client sent, with a hash of what it asked for. Raises a 400."""
    keys = request.headers.getlist(HEADER)
    if not keys:
        return None
    if len(keys) > 1 or not KEY.match(keys[0]):
        message = "Idempotency-Key has 1 to 255 visible ASCII characters, and is sent once."
        raise bad_request(message, "Idempotency-Key", "invalid_idempotency_key")
    asked = json.dumps(body.model_dump(mode="json", exclude=HOW_ONLY), sort_keys=True)
    return Idempotency(keys[0], hashlib.sha256(asked.encode()).hexdigest())


async def replayed(
    request: Request,
    body: GenerationRequest,
    face: Face,
    session: Session | None,
    reply: Callable[[int], Reply],
) -> Response | None:
    """The answer of the turn that was committed under this request's key; None when there is none, or no key.

    ``reply`` makes the endpoint's objects for a creation time in Unix seconds. The session must be claimed: then no
    first attempt is running. Raises a 422 when the key stands for another request.
    """
    idempotency = idempotency_of(request, body)
    if idempotency is None or session is None:
        return None
    found = await face.log.replay(session.tenant, session.name, idempotency.key)
    if found is None:
        return None
    if found.request_hash != idempotency.request_hash:
        message = "This Idempotency-Key was used for another request on this session."
        raise ApiError(422, message, param="Idempotency-Key", code="idempotency_key_reused")
    made = reply(found.created)
    headers = {**headers_of(session), "idempotent-replayed": "true"}
    if body.stream:
        return EventStream(_events(made, found), lambda: None, headers, done=made.done, failed=made.failed)
    draft = Draft()
    draft.add(Delta("", text=found.text))
    draft.finish = _finish(found)
    answer = encoder.encode(made.body([draft], _usage(found), None))
    return Response(answer, headers=headers, media_type="application/json")


async def _events(reply: Reply, found: Replayed) -> AsyncGenerator[bytes]:
    """A stream of one piece. Its receipt is null: nothing was computed."""
    usage, draft, delta = _usage(found), Draft(), Delta("", text=found.text)
    field = usage if reply.wish.everywhere else reply.wish.elsewhere
    parts = draft.add(delta)
    draft.finish = _finish(found)
    for told in (
        *reply.opening(0, field),
        *reply.piece(0, delta, parts, field),
        *reply.ending(0, draft, field, None),
        *reply.closing([draft], usage, None),
    ):
        yield reply.event(told)


def _usage(found: Replayed) -> Usage:
    prompt, completion = found.prompt_tokens, found.completion_tokens
    return Usage(prompt, completion, prompt + completion, CachedTokens(found.cached))


def _finish(found: Replayed) -> Finish:
    """Only ``stop`` and ``length`` are ever committed."""
    return "length" if found.finish_reason == "length" else "stop"
