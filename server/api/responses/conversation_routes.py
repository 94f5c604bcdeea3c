"""Routes of conversations, which are sessions shown as lists of items."""

from __future__ import annotations

import uuid
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from server.api.responses import objects as objects
from server.api.responses.input_items import gather_input, page_of
from server.api.responses.response_branch import CONVERSATION, conversation_not_found, conversation_of
from server.api.responses.schemas import AddItems, CreateConversation, Including, ListItems, UpdateConversation
from server.api.sessions.routes import delete_session_and_turn
from server.chat.prompts import check_bytes
from server.errors import ApiError, bad_request
from server.http.body import JsonRoute
from server.http.json_response import json_response
from server.http.media_admission import media_of
from server.log.identity import Session
from server.log.logged_message import LoggedMessage
from server.log.timeline import SessionRecord, SessionSummary
from server.schemas.common_objects import DataPage, DeletedObject
from server.schemas.items import CompactionItem, Item, entries_of, items_of, without
from server.turns.context import ServerContext, context_of

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/conversations")
async def create_conversation(body: CreateConversation, request: Request) -> Response:
    """Create a conversation, optionally with items."""
    context, tenant = context_of(request), request.state.tenant
    session = Session(tenant, uuid.uuid4().hex, stateful=True)
    _, messages = await gather_input(context, tenant, session.name, [], body.items, "items")
    check_room(context, messages)
    summary = await context.log.create(
        tenant, session.name, messages=messages, metadata=body.metadata, media=media_of(request)
    )
    return json_response(conversation_object(summary))


@router.get("/v1/conversations/{conversation_id}")
async def retrieve_conversation(conversation_id: str, request: Request) -> Response:
    """Get a conversation."""
    session = conversation_session(request, conversation_id)
    summary = await context_of(request).log.summary(session.tenant, session.name)
    if summary is None:
        raise conversation_not_found()
    return json_response(conversation_object(summary))


@router.post("/v1/conversations/{conversation_id}")
async def update_conversation(conversation_id: str, body: UpdateConversation, request: Request) -> Response:
    """Change a conversation's metadata, also while a response is running."""
    context, session = context_of(request), conversation_session(request, conversation_id)
    await require_conversation(context, session)
    summary = await context.log.update(session.tenant, session.name, metadata=body.metadata or {})
    return json_response(conversation_object(summary))


@router.delete("/v1/conversations/{conversation_id}")
async def delete_conversation(conversation_id: str, request: Request) -> Response:
    """Delete a conversation with its items and responses. A running response ends."""
    if not await delete_session_and_turn(context_of(request), conversation_session(request, conversation_id)):
        raise conversation_not_found()
    return json_response(DeletedObject("conversation.deleted", conversation_id))


@router.post("/v1/conversations/{conversation_id}/items")
async def create_items(
    conversation_id: str, body: AddItems, query: Annotated[Including, Query()], request: Request
) -> Response:
    """Append items, which the next response reads."""
    context, session = context_of(request), conversation_session(request, conversation_id)
    async with context.log.holding(session.tenant, session.name):
        record = await require_conversation(context, session)
        items, messages = await gather_input(
            context, session.tenant, session.name, record.messages, body.items, "items"
        )
        check_room(context, messages)
        count, media = len(record.messages), media_of(request)
        await context.log.revise(session.tenant, session.name, count, messages, expect=record.version, media=media)
    return json_response(DataPage(items, items[0].id, items[-1].id, has_more=False))


@router.get("/v1/conversations/{conversation_id}/items")
async def list_items(conversation_id: str, query: Annotated[ListItems, Query()], request: Request) -> Response:
    """List the items of a conversation."""
    context, session = context_of(request), conversation_session(request, conversation_id)
    record = await require_conversation(context, session)
    items = [item for _, item in items_of(record.messages, session.name)]
    return json_response(page_of(msgspec.to_builtins(items), query))


@router.get("/v1/conversations/{conversation_id}/items/{item_id}")
async def retrieve_item(
    conversation_id: str, item_id: str, query: Annotated[Including, Query()], request: Request
) -> Response:
    """Get an item."""
    context, session = context_of(request), conversation_session(request, conversation_id)
    return json_response(find_item(await require_conversation(context, session), session, item_id)[1])


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}")
async def delete_item(conversation_id: str, item_id: str, request: Request) -> Response:
    """Remove an item from the timeline. The items before it keep their KV; those after it are computed again with
    the next response."""
    context, session = context_of(request), conversation_session(request, conversation_id)
    async with context.log.holding(session.tenant, session.name):
        record = await require_conversation(context, session)
        number, item = find_item(record, session, item_id)
        if isinstance(item, CompactionItem):
            message = "A compaction cannot be removed: the conversation from before it is a session of its own."
            raise bad_request(message, "item_id", "item_not_removable")
        rest = [write_item_ids(record.messages, session, index) for index in range(number, len(record.messages))]
        left = without(rest[0], session.name, number, item_id)
        messages = rest[1:] if left is None else [left, *rest[1:]]
        summary = await context.log.revise(session.tenant, session.name, number, messages, expect=record.version)
    return json_response(conversation_object(summary))


def conversation_session(request: Request, conversation_id: str) -> Session:
    """The session of the path. Raises a 404 for an invalid conversation id."""
    session = conversation_of(request.state.tenant, conversation_id)
    if session is None:
        raise conversation_not_found()
    return session


async def require_conversation(context: ServerContext, session: Session) -> SessionRecord:
    """The conversation's record. Raises a 404, also for another tenant's."""
    record = await context.log.get(session.tenant, session.name)
    if record is None:
        raise conversation_not_found()
    return record


def find_item(record: SessionRecord, session: Session, item_id: str) -> tuple[int, Item]:
    """An item and the index of its message. Raises a 404."""
    for number, item in items_of(record.messages, session.name):
        if item.id == item_id:
            return number, item
    raise ApiError(404, "There is no item with this id in this conversation.", code="item_not_found")


def write_item_ids(messages: list[LoggedMessage], session: Session, number: int) -> LoggedMessage:
    """A message with the ids of its items stored in it, as its index will change."""
    message = messages[number]
    if message.instructions:
        return message
    return msgspec.structs.replace(message, items=tuple(entries_of(message, session.name, number)))


def check_room(context: ServerContext, messages: list[LoggedMessage]) -> None:
    """Refuse items that are too large for any prompt, if the model is known."""
    if context.engine.facts is not None:
        check_bytes((message.content for message in messages), context.engine.facts, "items")


def conversation_object(summary: SessionSummary) -> objects.ConversationObject:
    return objects.ConversationObject(CONVERSATION + summary.id, summary.created, summary.metadata)
