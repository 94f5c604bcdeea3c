"""Routes of links: ``/v1/sessions/{id}/shares`` for those who may share the session, ``/v1/shared`` for those who have
a link. The link's secret comes in a header, so that no log of addresses has it.
"""

from __future__ import annotations

import hmac
import secrets
import time
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from fastapi import Path as PathParameter
from pydantic import Field
from starlette.responses import Response

from server.api.sessions.objects import MessageObject, message_objects, turn_objects
from server.api.sessions.routes import require_session, session_of_path
from server.errors import ApiError, bad_request
from server.http.body import JsonRoute
from server.http.json_response import json_response
from server.log.session_log import SessionLog
from server.log.share_rows import MOST, Share, TooManyShares, digest_of
from server.log.timeline import SessionRecord, title_of
from server.models.registry import registry_of
from server.schemas.common_objects import DataList, DeletedObject
from server.schemas.field_types import INT32
from server.schemas.strict import Strict
from server.turns.context import context_of

router = APIRouter(route_class=JsonRoute)
SECRET = "x-share-secret"  # the header of those who have a link
ID = 16  # characters of the digest that name a link
MINUTE, WEEK, YEAR = 60, 7 * 86_400, 366 * 86_400  # seconds
HEADERS = {"cache-control": "no-store"}


class CreateShare(Strict):
    """``POST /v1/sessions/{id}/shares``: up to the end of a turn; absent: of the last one."""

    turn: Annotated[int, Field(ge=1, le=INT32)] | None = None
    expires_in_seconds: Annotated[int, Field(ge=MINUTE, le=YEAR)] = WEEK


class ShareObject(msgspec.Struct, frozen=True, tag_field="object", tag="session.share", omit_defaults=True):
    """A link. ``secret`` is told once, to whoever makes it."""

    id: str
    session_id: str
    turn: int
    created_at: int
    expires_at: int
    secret: str | None = None


class SharedBranch(msgspec.Struct, frozen=True, tag_field="object", tag="shared_branch"):
    """What a link shows: the messages up to its turn. The session's id and metadata are not among it."""

    title: str
    created_at: int
    expires_at: int
    messages: list[MessageObject]


def share_object(share: Share, secret: str | None = None) -> ShareObject:
    return ShareObject(share.digest[:ID], share.session, share.turn, share.created, share.expires, secret)


@router.post("/v1/sessions/{session_id}/shares", status_code=201)
async def create_share(session_id: str, body: CreateShare, request: Request) -> Response:
    """Make a link to the session up to a turn. Whoever has its secret may read that without a key, until it expires or
    is revoked, the session is deleted, or the branch is changed before that turn."""
    log, session = context_of(request).log, session_of_path(request, session_id)
    record = await require_session(context_of(request), session)
    turns = turn_objects(record)
    last = body.turn or len(turns)
    if not turns or last > len(turns):
        raise bad_request(f"turn can be at most {len(turns)} in this session.", "turn", "invalid_value")
    secret, now = secrets.token_urlsafe(32), int(time.time())
    mark = turns[last - 1].id
    share = Share(digest_of(secret), session.tenant, session.name, last, mark, now, now + body.expires_in_seconds)
    try:
        await log.shares.add(share)
    except TooManyShares:
        message = f"A session has at most {MOST} links: revoke one."
        raise bad_request(message, code="too_many_shares") from None
    return json_response(share_object(share, secret), 201)


@router.get("/v1/sessions/{session_id}/shares")
async def list_shares(session_id: str, request: Request) -> Response:
    """List the session's links, without their secrets."""
    session = session_of_path(request, session_id)
    found = await context_of(request).log.shares.of_session(session.tenant, session.name)
    return json_response(DataList([share_object(share) for share in found]))


@router.delete("/v1/sessions/{session_id}/shares/{share_id}")
async def revoke_share(
    session_id: str, share_id: Annotated[str, PathParameter(pattern=f"^[0-9a-f]{{{ID}}}$")], request: Request
) -> Response:
    """Revoke a link: it leads nowhere from then on."""
    session = session_of_path(request, session_id)
    if not await context_of(request).log.shares.revoke(session.tenant, session.name, share_id):
        raise no_such_share()
    return json_response(DeletedObject("session.share.deleted", share_id))


@router.get("/v1/shared")
async def read_shared(request: Request) -> Response:
    """Read what a link shows. Its secret is the header `X-Share-Secret`; no API key is needed."""
    secret = request.headers.get(SECRET, "")
    log: SessionLog = registry_of(request).context().log
    share = await log.shares.find(secret) if secret.isascii() and 0 < len(secret) <= 128 else None
    record = None if share is None else await log.get(share.tenant, share.session)
    if share is None or record is None or not is_there(share, record):
        raise no_such_share()
    until = record.turns[share.turn - 1].messages
    messages = [share_message(message) for message in message_objects(record)[:until]]
    first = next((message.content for message in messages if message.role == "user"), "")
    response = json_response(SharedBranch(title_of(record.metadata, first), share.created, share.expires, messages))
    response.headers.update(HEADERS)
    return response


def is_there(share: Share, record: SessionRecord) -> bool:
    """Whether the branch still has the turn that was shared, as it was."""
    turns = turn_objects(record)
    return len(turns) >= share.turn and hmac.compare_digest(turns[share.turn - 1].id, share.mark)


def share_message(message: MessageObject) -> MessageObject:
    """A message without what only the client that wrote it needs."""
    hidden: dict[str, Any] = {"tools": msgspec.UNSET, "template": msgspec.UNSET}
    return msgspec.structs.replace(message, **hidden)


def no_such_share() -> ApiError:
    """The 404: whether a link never was, has expired or was revoked is not told."""
    return ApiError(404, "There is no such link, or it has expired or was revoked.", code="share_not_found")
