"""Stored chats in OpenAI's format: the fields that are stored with ``store: true``, list pages, and request schemas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from pydantic import Field

from scheduler.sampling_params import Sampling
from server.log.chat_rows import StoredChat
from server.log.logged_message import LoggedMessage
from server.media.media import interleave
from server.schemas.common_objects import DataPage
from server.schemas.metadata import Metadata
from server.schemas.query import FilteredQuery, Query
from server.schemas.requests import ChatRequest, ReplyRequest
from server.schemas.strict import Strict

BEGUN = "chat_"  # how the sessions begin that a stored chat has begun
TOLD = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


class ListChats(FilteredQuery):
    """``GET /v1/chat/completions``: a page of stored chats, filtered; ``after`` is the id of one."""

    limit: int = Field(20, ge=1, le=100)
    after: str | None = Field(None, max_length=200)
    order: Literal["asc", "desc"] = "asc"
    model: str | None = Field(None, max_length=512)


class ListChatMessages(Query):
    """``GET /v1/chat/completions/{id}/messages``."""

    limit: int = Field(20, ge=1, le=100)
    after: str | None = Field(None, max_length=210)
    order: Literal["asc", "desc"] = "asc"


class UpdateChat(Strict):
    """``POST /v1/chat/completions/{id}``. Null or nothing: no metadata."""

    NULLS = frozenset({"metadata"})
    metadata: Metadata | None


def page(data: Sequence[dict[str, Any]], more: bool) -> DataPage[dict[str, Any]]:
    return DataPage([*data], data[0]["id"] if data else None, data[-1]["id"] if data else None, more)


def messages_of(chat: StoredChat) -> list[dict[str, Any]]:
    """The messages of a chat, with ids."""
    return [
        {"id": f"{chat.body['id']}-{number}", "content_parts": None, "name": None, "refusal": None, **message}
        for number, message in enumerate(chat.messages)
    ]


def request_fields(body: ReplyRequest, sampling: Sampling, request_id: str | None) -> dict[str, Any]:
    """The parameters of a chat's request that are stored with its answer."""
    told = body.model_dump(mode="json", by_alias=True, include={"tool_choice", "response_format"})
    return {
        **told,
        "tools": None if body.tools is None else [tool.plain() for tool in body.tools],
        "request_id": request_id,
        "seed": body.seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "input_user": body.user or None,
        "metadata": dict(body.metadata or {}),
    }


def request_messages(body: ReplyRequest, before: Sequence[LoggedMessage]) -> list[dict[str, Any]]:
    """The messages of a stored chat's request; if it has none, the last message ``before`` the reply."""
    messages = [message.plain() for message in body.messages] if isinstance(body, ChatRequest) else before[-1:]
    plain = [{**msgspec.to_builtins(message), "content": sent_content(message)} for message in messages]
    return [{name: message[name] for name in TOLD if name in message} for message in plain]


def sent_content(message: LoggedMessage) -> str | list[dict[str, Any]]:
    """A logged content as a client can send it."""
    if not message.media:
        return message.content
    return [
        {"type": "text", "text": one}
        if isinstance(one, str)
        else {"type": f"{one.kind}_url", f"{one.kind}_url": {"url": one.url}}
        for one in interleave(message.content, message.media)
    ]
