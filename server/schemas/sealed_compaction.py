"""A compaction as clients keep it: the messages that stand for a conversation, encoded, but not secret."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

import msgspec
from msgspec import structs
from pydantic import ValidationError

from server.errors import ApiError
from server.log.logged_message import LoggedMessage, to_json
from server.media.media import without_media
from server.schemas.json_body import parse
from server.schemas.messages import MAX_MESSAGES, check_calls
from server.schemas.tools import Tool

SEAL = "wt2:"  # in front of what this server has made
SPOKEN = ("user", "assistant", "tool")


def seal_messages(messages: Sequence[LoggedMessage]) -> str:
    """The question, the summary and the newest messages of a compacted conversation, as one text."""
    body = f'{{"messages":{to_json(map(plain_message, messages))}}}'
    return SEAL + base64.b64encode(body.encode()).decode()


def unseal_messages(sealed: str) -> list[LoggedMessage] | None:
    """The inverse of ``seal_messages``; None for other text, and for messages that cannot be a conversation."""
    if not sealed.startswith(SEAL):
        return None
    try:
        data = base64.b64decode(sealed.removeprefix(SEAL), validate=True)
        given = msgspec.convert(parse(data).get("messages"), list[LoggedMessage])
        messages = [check_message(plain_message(message)) for message in given]
        check_calls([], messages)
    except (binascii.Error, ValueError, TypeError, ApiError):
        return None
    roles = [message.role for message in messages[:2]]
    return messages if roles == ["user", "assistant"] and len(messages) <= MAX_MESSAGES else None


def plain_message(message: LoggedMessage) -> LoggedMessage:
    """A message with what is said in it only; pictures are named in brackets, as nobody keeps their bytes."""
    said = structs.replace(message, content=without_media(message.content, message.media), media=())
    return structs.replace(said, items=(), instructions=False, tools=None, template=None, begun=0, dropped=False)


def check_message(message: LoggedMessage) -> LoggedMessage:
    """The message, as clients may have written it themselves. Raises ValueError for one that no request could have."""
    if message.role not in SPOKEN:
        raise ValueError("a role that is no part of a conversation")
    try:
        tools = [Tool.model_validate(tool).plain() for tool in message.added_tools]
    except ValidationError:
        raise ValueError("a tool that is none") from None
    return structs.replace(message, added_tools=(*tools,))
