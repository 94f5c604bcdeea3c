"""Side calls: requests that a client makes beside a conversation, under its hint: titles, topics, warm-ups, pings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from server.chat.rendering import Rendering, rendering_in_force, tool_names
from server.lines.hints import Hint
from server.log.logged_message import LoggedMessage
from server.log.timeline import SessionRecord

MARKS: Mapping[str, frozenset[str]] = {  # headers and their values that say so
    "x-app": frozenset({"cli-bg"}),
    "x-openai-subagent": frozenset({"compact", "memory_consolidation"}),
}


def is_marked(headers: Mapping[str, str], limit: int | None) -> bool:
    """Whether the client says so: in a header, or with a reply of at most one token (``limit``)."""
    return (limit is not None and limit <= 1) or any(headers.get(name) in values for name, values in MARKS.items())


def is_aside(
    hint: Hint, messages: Sequence[LoggedMessage], rendering: Rendering, records: Sequence[SessionRecord]
) -> bool:
    """Whether a request that agrees with no turn of the hint's lines (``records``) is one, as far as can be seen: it
    has no earlier reply, and other tools than the lines; before there is one, no tools where the conversations of such
    clients have some. Should it come back with its reply, it was the beginning of a conversation.
    """
    if any(message.role == "assistant" for message in messages):
        return False
    if not records:
        return hint.calls_tools and not rendering.tools
    return not rendering.tools or not any(has_tools_of(record, rendering) for record in records)


def has_tools_of(record: SessionRecord, rendering: Rendering) -> bool:
    """Whether a line has a tool that the request has too."""
    return bool(tool_names(rendering_in_force(record.messages).tools) & tool_names(rendering.tools))
