"""Routes of stored chats, as in OpenAI's API: list, retrieve, update metadata, delete."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from server.api.openai import stored_chats as objects
from server.api.sessions.routes import delete_held_session
from server.errors import ApiError
from server.http.body import JsonRoute
from server.http.json_response import json_response
from server.log.chat_rows import StoredChat, parse_chat_id
from server.log.claims import SessionBusy
from server.log.identity import Session
from server.schemas.common_objects import DeletedObject
from server.turns.context import ServerContext, context_of

router = APIRouter(route_class=JsonRoute)


@router.get("/v1/chat/completions")
async def list_chat_completions(query: Annotated[objects.ListChats, Query()], request: Request) -> Response:
    """List the tenant's stored chats, the oldest first by default."""
    page = await context_of(request).log.chats.page(
        request.state.tenant,
        limit=query.limit,
        after=query.after,
        descending=query.order == "desc",
        model=query.model,
        metadata=query.metadata,
    )
    if page is None:
        raise chat_not_found("after")
    chats, more = page
    return json_response(objects.page([chat.body for chat in chats], more))


@router.get("/v1/chat/completions/{completion_id}")
async def retrieve_chat_completion(completion_id: str, request: Request) -> Response:
    """Get a stored chat."""
    return json_response((await find_chat(request, completion_id)).body)


@router.get("/v1/chat/completions/{completion_id}/messages")
async def list_chat_messages(
    completion_id: str, query: Annotated[objects.ListChatMessages, Query()], request: Request
) -> Response:
    """List the messages of a stored chat's request."""
    chat = await find_chat(request, completion_id)
    told = objects.messages_of(chat)
    if query.order == "desc":
        told.reverse()
    if query.after is not None:
        ids = [message["id"] for message in told]
        if query.after not in ids:
            raise ApiError(
                404, "after is not the id of a message in this list.", param="after", code="message_not_found"
            )
        told = told[ids.index(query.after) + 1 :]
    return json_response(objects.page(told[: query.limit], len(told) > query.limit))


@router.post("/v1/chat/completions/{completion_id}")
async def update_chat_completion(completion_id: str, body: objects.UpdateChat, request: Request) -> Response:
    """Replace the metadata of a stored chat; that of its session is not changed."""
    metadata: dict[str, Any] = body.metadata or {}
    chat = await context_of(request).log.chats.update(request.state.tenant, completion_id, metadata)
    if chat is None:
        raise chat_not_found()
    return json_response(chat.body)


@router.delete("/v1/chat/completions/{completion_id}")
async def delete_chat_completion(completion_id: str, request: Request) -> Response:
    """Delete a stored chat, and the session that it began if that has no other turns."""
    context, tenant = context_of(request), request.state.tenant
    left = await context.log.chats.delete(tenant, completion_id)
    place = parse_chat_id(completion_id)
    if left is None or place is None:
        raise chat_not_found()
    if left == 0 and place[0].startswith(objects.BEGUN):
        await delete_begun_session(context, Session(tenant, place[0], stateful=True))
    return json_response(DeletedObject("chat.completion.deleted", completion_id))


async def delete_begun_session(context: ServerContext, session: Session) -> None:
    """Delete a session that a stored chat began, unless it is in use or has other turns."""
    with suppress(SessionBusy):
        async with context.log.holding(session.tenant, session.name):
            summary = await context.log.summary(session.tenant, session.name)
            if summary is not None and summary.turns <= 1:
                await delete_held_session(context, session)


async def find_chat(request: Request, id: str) -> StoredChat:
    """The chat. Raises a 404."""
    chat = await context_of(request).log.chats.get(request.state.tenant, id)
    if chat is None:
        raise chat_not_found()
    return chat


def chat_not_found(param: str | None = None) -> ApiError:
    message = "There is no stored chat completion with this id."
    return ApiError(404, message, param=param, code="chat_completion_not_found")
