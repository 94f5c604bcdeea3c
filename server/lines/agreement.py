"""How many messages of a request are those of a log: what clients leave out or write anew without another meaning does
not count, their content does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs
from pydantic_core import from_json

from server import surrogates
from server.log.logged_message import LoggedCall, LoggedMessage

FRONT = ("system", "developer")


@dataclass
class Agreement:
    """``messages``: how many of the first messages are the same. ``ids``: the logged ids of calls by the client's."""

    messages: int = 0
    ids: dict[str, str] = field(default_factory=dict)


def agreement(logged: Sequence[LoggedMessage], given: Sequence[LoggedMessage]) -> Agreement:
    """Compare a log with a client's messages, from the first one on."""
    found = Agreement()
    for one, other in zip(logged, given, strict=False):
        if one is not other and not is_same(one, other, found.ids):
            break
        found.ids |= {theirs.id: ours.id for ours, theirs in zip(one.tool_calls, other.tool_calls, strict=True)}
        found.messages += 1
    return found


def is_same(logged: LoggedMessage, given: LoggedMessage, ids: Mapping[str, str]) -> bool:
    """Whether a client means a logged message. Not compared: reasoning that the client has left out, whitespace at the
    end (of a reply also at its beginning), the form of a call's arguments, and ids of calls, which ``ids`` translates.
    """
    if (logged.role, logged.name, logged.added_tools) != (given.role, given.name, given.added_tools):
        return False
    if ids.get(given.tool_call_id, given.tool_call_id) != logged.tool_call_id:
        return False
    if logged.role == "assistant":
        same = logged.content.strip() == given.content.strip()
    else:
        same = logged.content.rstrip() == given.content.rstrip()
    same = same and [one.digest for one in logged.media] == [one.digest for one in given.media]
    return same and is_same_reasoning(logged, given) and are_same_calls(logged.tool_calls, given.tool_calls)


def is_same_reasoning(logged: LoggedMessage, given: LoggedMessage) -> bool:
    """Whether the client has left reasoning out, or has the logged one, whatever its line breaks."""
    theirs = given.reasoning_content.split()
    return not theirs or theirs == logged.reasoning_content.split()


def are_same_calls(logged: Sequence[LoggedCall], given: Sequence[LoggedCall]) -> bool:
    """Whether the same functions are called with the same arguments, in the same order."""
    return len(logged) == len(given) and all(
        ours.function.name == theirs.function.name
        and (
            ours.function.arguments == theirs.function.arguments
            or plain_arguments(ours.function.arguments) == plain_arguments(theirs.function.arguments)
        )
        for ours, theirs in zip(logged, given, strict=True)
    )


def plain_arguments(text: str) -> str:
    """A call's arguments without what JSON readers change: spaces, the order of keys, 1.0 for 1. Arguments that were
    cut off are read as far as they go, as the client was told them.
    """
    try:
        value = from_json(surrogates.mend(text), allow_partial=True)
    except ValueError:
        value = {}
    return json.dumps(plain_numbers(value), sort_keys=True)


def plain_numbers(value: object) -> object:
    """A JSON value with whole numbers as integers."""
    if isinstance(value, dict):
        return {key: plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def with_logged_ids(messages: Sequence[LoggedMessage], ids: Mapping[str, str]) -> list[LoggedMessage]:
    """``messages`` whose first tool results name the logged calls that they answer."""
    made = [*messages]
    for index, message in enumerate(messages):
        if message.role != "tool":
            break
        made[index] = structs.replace(message, tool_call_id=ids.get(message.tool_call_id, message.tool_call_id))
    return made


def count_kept_reasoning(logged: Sequence[LoggedMessage], given: Sequence[LoggedMessage]) -> int:
    """Of how many messages the log has reasoning that the client has left out."""
    return sum(
        bool(one.reasoning_content) and not other.reasoning_content.strip()
        for one, other in zip(logged, given, strict=False)
    )


def differs_in_front(logged: Sequence[LoggedMessage], given: Sequence[LoggedMessage]) -> bool:
    """Whether a request is a logged conversation with other instructions in front: at least the first question and its
    reply are the same.
    """
    ours = next((i for i, message in enumerate(logged) if message.role not in FRONT), len(logged))
    theirs = next((i for i, message in enumerate(given) if message.role not in FRONT), len(given))
    same = agreement(logged[ours:], given[theirs:]).messages
    return any(message.role == "assistant" for message in logged[ours : ours + same])
