"""The content of a message as chat templates take it: text, or a list of parts where there are pictures or sounds."""

from __future__ import annotations

from typing import Any

from server.log.logged_message import LoggedMessage
from server.media.media import interleave

Content = str | list[dict[str, Any]]


def template_content(message: LoggedMessage) -> Content:
    """The content of a logged message; a picture is ``{"type": "image"}``."""
    if not message.media:
        return message.content
    parts = interleave(message.content, message.media)
    return [text_part(part) if isinstance(part, str) else {"type": part.kind} for part in parts]


def surround(before: str, content: Content, behind: str) -> Content:
    """A content between two texts."""
    return append(append(before, "", content), "", behind)


def append(content: Content, between: str, other: Content) -> Content:
    """A content, a text, and another content."""
    if isinstance(content, str) and isinstance(other, str):
        return f"{content}{between}{other}"
    parts: list[dict[str, Any]] = []
    for part in (*parts_of(content), *parts_of(between), *parts_of(other)):
        if parts and parts[-1]["type"] == part["type"] == "text":
            parts[-1] = text_part(parts[-1]["text"] + part["text"])
        else:
            parts.append(part)
    return parts


def parts_of(content: Content) -> list[dict[str, Any]]:
    """A content as parts; none for an empty text."""
    if isinstance(content, str):
        return [text_part(content)] if content else []
    return content


def text_part(text: str) -> dict[str, Any]:
    """A text as a part."""
    return {"type": "text", "text": text}
