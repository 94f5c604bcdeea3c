"""A chat's messages as clients send them, before they are validated: what tools gave back and is no text is named in
brackets, and calls without ids get them.
"""

from __future__ import annotations

from typing import Any

from server.schemas.adaptations import adapt

PART_TYPES = frozenset({"image_url", "input_audio", "file", "video_url", "audio_url", "image", "video"})


def mend_history(value: object) -> object:
    """The messages, with text for pictures and files that tools gave back, and with an id for each call that has "".
    Clients whose API has only text in tool messages send a tool's pictures in a user message behind it.
    """
    if not isinstance(value, list):
        return value
    made: list[object] = []
    waiting: list[str] = []  # ids that were given to calls that have not been answered
    after_tools = False
    for number, message in enumerate(value):
        if not isinstance(message, dict):
            made.append(message)
            continue
        role = message.get("role")
        after_tools = role == "tool" or (role == "user" and after_tools)
        if after_tools:
            message = with_seen_replaced(message)
        if role == "assistant":
            message, waiting = with_ids(message, number)
        elif role == "tool" and message.get("tool_call_id") == "" and waiting:
            message = {**message, "tool_call_id": waiting.pop(0)}
        made.append(message)
    return made


def with_seen_replaced(message: dict[str, Any]) -> dict[str, Any]:
    """A message with text in place of the parts that are none."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [seen_as_text(part, str(message["role"])) for part in content]}


def seen_as_text(part: object, role: str) -> object:
    """A part of a message of this role: the kind in brackets if it is no text."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in PART_TYPES:
        return part
    shown = "image" if "image" in kind else "file"
    adapt(f"{shown}_replaced", role)
    return {"type": "text", "text": f"[{shown}]"}


def with_ids(message: dict[str, Any], number: int) -> tuple[dict[str, Any], list[str]]:
    """An earlier reply whose calls all have ids, and the ids that were given; ``number`` is its place."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or all(not is_unnamed(call) for call in calls):
        return message, []
    given = {index: f"call_{number}_{index}" for index, call in enumerate(calls) if is_unnamed(call)}
    made = [{**call, "id": given[index]} if index in given else call for index, call in enumerate(calls)]
    return {**message, "tool_calls": made}, [*given.values()]


def is_unnamed(call: object) -> bool:
    return isinstance(call, dict) and call.get("id") == ""
