"""Items of responses and conversations: their structs, and the conversion from logged messages.

A logged message that was made from items has ``items``: for each of them its id, the number of characters of the
message's text that belong to it, and "incomplete" if it is. So an item has the same id wherever it is shown. Other
messages are shown as items too, with ids derived from their content and position.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType, structs

from server.log.identity import SESSION_ID
from server.log.logged_message import LoggedMessage, Role
from server.schemas.call_items import CALL_KINDS, OUTPUT_KINDS, AnyCall, AnyOutput, call_item, output_item
from server.schemas.item_texts import InputPart, OutputText, ReasoningText, Status, input_parts, plain_parts

SEALED_AT = 3  # where the entry of a summary has what clients keep of the compaction
ITEM_KINDS = ("msg", "rs", "at", "cmp", *CALL_KINDS, *OUTPUT_KINDS)


# --- ids ------------------------------------------------------------------------------------------------------


def new_id(kind: str, session: str | None) -> str:
    """A unique id that contains the session, for routers and later look-ups; without a session, the item cannot be
    found again.
    """
    return f"{kind}_{secrets.token_hex(16)}" if session is None else f"{kind}_{session}_{secrets.token_hex(6)}"


def parse_id(given: str, *kinds: str) -> tuple[str, str] | None:
    """Session and key of an id of a known kind; None for other ids."""
    kind, _, rest = given.partition("_")
    session, _, key = rest.rpartition("_")
    ours = kind in kinds and SESSION_ID.match(session) and key.isalnum() and key.isascii() and len(key) <= 32
    return (session, key) if ours else None


# --- the wire's objects -----------------------------------------------------------------------------------------


class MessageItem(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """A message."""

    id: str
    role: Role
    content: list[InputPart | OutputText]
    status: Status = "completed"


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """Reasoning. ``encrypted_content`` replaces ``content`` if a client asks for it."""

    id: str
    content: list[ReasoningText]
    summary: list[None] = []
    encrypted_content: str | UnsetType = UNSET
    status: Status = "completed"


class AddedToolsItem(msgspec.Struct, frozen=True, tag_field="type", tag="additional_tools"):
    """Tools that can be called from here on, as the client has sent them."""

    id: str
    tools: list[Any]
    role: Literal["developer"] = "developer"


class CompactionItem(msgspec.Struct, frozen=True, tag_field="type", tag="compaction"):
    """A summary that takes the place of what came before it. ``encrypted_content`` is encoded, but not secret."""

    id: str
    encrypted_content: str


Item = MessageItem | ReasoningItem | AddedToolsItem | CompactionItem | AnyCall | AnyOutput
Entry = list[Any]  # id, characters, status unless it is "completed", and what more the log holds of it


def entry(id: str, text: str, status: Status = "completed", *more: str) -> Entry:
    """An item as its message tells of it. ``more``: of a call, the name and the namespace that the client knows it by;
    of tools, their JSON; of a compaction, in its summary only, the ``encrypted_content``.
    """
    return [id, len(text)] if status == "completed" and not more else [id, len(text), status, *more]


# --- messages as items ------------------------------------------------------------------------------------------


def items_of(messages: Sequence[LoggedMessage], session: str) -> Iterator[tuple[int, Item]]:
    """All items of a timeline, each with the index of its message."""
    for number, message in enumerate(messages):
        for item in message_items(message, session, number):
            yield number, item


def message_items(message: LoggedMessage, session: str, number: int) -> Iterator[Item]:
    """The items of a message; none for instructions, which belong to one response."""
    if message.instructions:
        return
    role = message.role
    entries = entries_of(message, session, number)
    if kind_of(entries[0]) == "cmp":
        if len(entries[0]) > SEALED_AT:  # the summary; the other messages of a compaction have its id only
            yield CompactionItem(entries[0][0], entries[0][SEALED_AT])
    elif role == "tool":
        first, tools = entries[0], tools_of(entries[0])
        yield output_item(kind_of(first), first[0], message.tool_call_id, message.content, tools, message.media)
    elif kind_of(entries[0]) == "at":
        yield AddedToolsItem(entries[0][0], tools_of(entries[0]))
    elif role != "assistant":
        yield MessageItem(entries[0][0], role, [*input_parts(message.content, message.media)])
    else:
        yield from reply_items(message, entries)


def reply_items(message: LoggedMessage, entries: Sequence[Entry]) -> Iterator[Item]:
    """The items of a reply. If its text was changed since, the last item of each kind has the rest of that kind's
    text.
    """
    texts = {"rs": message.reasoning_content, "msg": message.content}
    last = {kind_of(entry): index for index, entry in enumerate(entries)}
    calls = iter(message.tool_calls)
    for index, (id, size, *marks) in enumerate(entries):
        kind = kind_of([id])
        status: Status = marks[0] if marks else "completed"
        if kind in CALL_KINDS:
            call = next(calls, None)
            if call is not None:
                name, namespace = marks[1:] or (call.function.name, "")
                yield call_item(kind, id, call.id, name, call.function.arguments, status, namespace or UNSET)
            continue
        end = len(texts[kind]) if index == last[kind] else size
        text, texts[kind] = texts[kind][:end], texts[kind][end:]
        if kind == "rs":
            yield ReasoningItem(id, [ReasoningText(text)], status=status)
        else:
            yield MessageItem(id, "assistant", [OutputText(text)], status)


def entries_of(message: LoggedMessage, session: str, number: int) -> list[Entry]:
    """The ``items`` of a message, derived ones if it has none."""
    if message.items:
        return [*message.items]
    facts = (number, message.role, message.content, *(one.digest for one in message.media))
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=6).hexdigest()

    def make_entry(kind: str, text: str, count: int = 0) -> Entry:
        return [f"{kind}_{session}_{digest}" + (f"x{count}" if count else ""), len(text)]

    if message.role == "tool":
        return [make_entry("fco", message.content)]
    entries = [make_entry("rs", message.reasoning_content)] if message.reasoning_content else []
    calls = message.tool_calls
    if message.content or not (calls or entries):
        entries.append(make_entry("msg", message.content))
    return entries + [make_entry("fc", "", count) for count, _ in enumerate(calls, 1)]


def tools_of(entry: Entry) -> list[Any]:
    """The tools that the entry of an item has as JSON; none for other items."""
    return list(json.loads(entry[3])) if kind_of(entry) in ("at", "tso") else []


def kind_of(entry: Entry) -> str:
    """The kind of an entry, from the prefix of its id."""
    return str(entry[0]).partition("_")[0]


def without(message: LoggedMessage, session: str, number: int, id: str) -> LoggedMessage | None:
    """A message without one of its items; None if nothing is left of it."""
    entries = entries_of(message, session, number)
    rest = [entry for entry in entries if entry[0] != id]
    if not rest:
        return None
    content, thought, calls = "", "", []
    for item, call in pair(reply_items(message, entries), message.tool_calls):
        match item:
            case _ if item.id == id:
                pass
            case MessageItem():
                content += plain_parts(item.content)[0]
            case ReasoningItem():
                thought += item.content[0].text
            case _:
                calls.append(call)
    return structs.replace(message, content=content, reasoning_content=thought, tool_calls=(*calls,), items=(*rest,))


def pair(items: Iterable[Item], calls: Sequence[Any]) -> Iterator[tuple[Item, Any]]:
    """Items; those that are calls together with the message's logged call."""
    waiting = iter(calls)
    for item in items:
        yield item, None if isinstance(item, MessageItem | ReasoningItem) else next(waiting)


def bare(message: LoggedMessage) -> LoggedMessage:
    """A message with only the fields that are rendered."""
    return structs.replace(message, items=(), instructions=False, begun=0, dropped=False)
