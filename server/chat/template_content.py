"""The content of a message as chat templates take it: text, or a list of parts where there are pictures or sounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from server.log.logged_message import LoggedMessage
from server.media.media import interleave

Content = str | list[dict[str, Any]]
_OPENAI = {"image": "image_url", "audio": "input_audio", "video": "video_url"}  # what some templates name media


def template_content(message: LoggedMessage) -> Content:
    """The content of a logged message; a picture is ``{"type": "image"}``."""
    if not message.media:
        return message.content
    parts = interleave(message.content, message.media)
    return [text_part(part) if isinstance(part, str) else {"type": part.kind} for part in parts]


def surround(before: str, content: Content, behind: str) -> Content:
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
    return {"type": "text", "text": text}


def with_own_parts(messages: Sequence[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """Messages whose media are named as a template does: as transformers' processors, or as OpenAI's API."""
    names = {kind: name for kind, name in _OPENAI.items() if name in template and not _quotes(template, kind)}
    if not names:
        return [*messages]
    return [{**message, "content": _renamed(message.get("content"), names)} for message in messages]


def _quotes(template: str, word: str) -> bool:
    return f"'{word}'" in template or f'"{word}"' in template


def _renamed(content: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(content, list):
        return content
    return [{**part, "type": names.get(part["type"], part["type"])} for part in content]
