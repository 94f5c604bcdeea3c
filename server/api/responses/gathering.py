"""``Gathering``: assembles logged messages from items."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from server.api.responses.client_tools import SEARCH, SHELL, ToolKey, ToolNames
from server.api.responses.sealed_reasoning import unseal
from server.api.responses.tool_schemas import tools_in
from server.chat.compaction import GO_ON, summary_messages
from server.errors import ApiError, bad_request
from server.log.logged_message import LoggedCall, LoggedFunction, LoggedMessage, Role
from server.media.media import PlacedMedia, without_media
from server.schemas.call_items import (
    AnyCall,
    AnyOutput,
    CallBase,
    CallItem,
    CustomCallItem,
    OutputBase,
    SearchCallItem,
    SearchOutputItem,
    arguments_of,
)
from server.schemas.item_texts import Status, plain_parts
from server.schemas.items import AddedToolsItem, CompactionItem, Entry, Item, MessageItem, ReasoningItem, entry, kind_of
from server.schemas.sealed_compaction import unseal_messages

LEADING = ("system", "developer")
NOTHING_FOUND = "No tools were found."


@dataclass
class GatheredMessage:
    """A message that is being assembled from items."""

    role: Role
    content: str = ""
    thoughts: list[str] = field(default_factory=list)
    calls: list[LoggedCall] = field(default_factory=list)
    call_id: str = ""
    items: list[Entry] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    dropped: bool = False
    media: list[PlacedMedia] = field(default_factory=list)

    @classmethod
    def of(cls, message: LoggedMessage) -> GatheredMessage:
        """A message that is complete."""
        thoughts = [message.reasoning_content] if message.reasoning_content else []
        calls, tools, removed = [*message.tool_calls], [*message.added_tools], [*message.removed_tools]
        return cls(message.role, message.content, thoughts, calls, message.tool_call_id, [], tools, removed)

    @property
    def logged(self) -> LoggedMessage:
        return LoggedMessage(
            self.role,
            self.content,
            reasoning_content="".join(self.thoughts),
            tool_calls=(*self.calls,),
            tool_call_id=self.call_id,
            items=(*self.items,),
            added_tools=(*self.tools,),
            removed_tools=(*self.removed,),
            dropped=self.dropped,
            media=(*self.media,),
        )


@dataclass
class Gathering:
    """Assembles messages from items: successive reasoning, text and calls of the assistant become one message.
    ``names`` are those of the functions that tools are for the model. ``calls`` are the ids of all calls so far,
    ``waiting`` those without an output; ``begun``: a user or the assistant has said something.
    """

    names: ToolNames = field(default_factory=ToolNames)
    begun: bool = False
    calls: set[str] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)
    _gathered: list[GatheredMessage] = field(default_factory=list)

    @classmethod
    def after(cls, past: Sequence[LoggedMessage], names: ToolNames) -> Gathering:
        """A Gathering that continues these messages."""
        made = cls(names, begun=any(message.role not in ("system", "developer") for message in past))
        for message in past:
            for call in message.tool_calls:
                made.calls.add(call.id)
                made.waiting.add(call.id)
            made.waiting.discard(message.tool_call_id)
        return made

    @property
    def messages(self) -> list[LoggedMessage]:
        return [message.logged for message in self._gathered]

    def add(self, item: Item, where: str) -> None:
        """Add one item; ``where`` is its place in the request, for errors. Raises a 400 for outputs without a call, and
        for duplicate calls.
        """
        match item:
            case OutputBase():
                self._add_output(item, where)
            case CallBase():
                self._add_call(item, where)
            case AddedToolsItem():
                self._add_tools(item)
            case CompactionItem(id, sealed):
                self._compact(id, sealed)
            case ReasoningItem(id, content, status=status):
                text = "\n".join(part.text for part in content)
                self._begin_answer()
                self._reply(entry(id, text, status)).thoughts.append(text)
            case MessageItem(id, "assistant", content, status):
                text, _ = plain_parts(content)
                self._begin_answer()
                self._reply(entry(id, text, status)).content += text
            case MessageItem(id, role, content):
                text, media = plain_parts(content)
                self._gathered.append(GatheredMessage(role, text, items=[entry(id, text)], media=media))
        self.begun = self.begun or (not isinstance(item, AddedToolsItem) and self._gathered[-1].role not in LEADING)

    def _add_call(self, item: AnyCall, where: str) -> None:
        """A call, under the name of its function."""
        if item.call_id in self.calls:
            raise call_id_error(where, "was already used by an earlier call")
        self.calls.add(item.call_id)
        self.waiting.add(item.call_id)
        key = key_of(item)
        name = self.names.name(key)
        call = LoggedCall(item.call_id, "function", LoggedFunction(name, arguments_of(item)))
        self._reply(call_entry(item.id, key, name, item.status)).calls.append(call)

    def _add_output(self, item: AnyOutput, where: str) -> None:
        """What a call gave back: text, or the tools that a search has found."""
        self._answer(item.call_id, where)
        made = GatheredMessage("tool", call_id=item.call_id)
        if isinstance(item, SearchOutputItem):
            made.tools = self.names.plain(tools_in(item.tools))
            made.content = "" if made.tools else NOTHING_FOUND
            made.items = [entry(item.id, made.content, "completed", json.dumps(item.tools, ensure_ascii=False))]
        else:
            given = item.output
            made.content, made.media = (given, []) if isinstance(given, str) else plain_parts(given)
            made.items = [entry(item.id, made.content)]
        self._gathered.append(made)

    def _add_tools(self, item: AddedToolsItem) -> None:
        """Tools that are added. Before the conversation has begun, they belong to the front of the prompt, and the
        message itself is not rendered.
        """
        made = GatheredMessage("developer", tools=self.names.plain(tools_in(item.tools)), dropped=not self.begun)
        made.items = [entry(item.id, "", "completed", json.dumps(item.tools, ensure_ascii=False))]
        self._gathered.append(made)

    def _compact(self, id: str, sealed: str) -> None:
        """A summary in place of what came before it in the request. Instructions stay, and the user's words too, unless
        the item has the newest messages itself.
        """
        leading = [*takewhile(lambda one: one.role in LEADING, self._gathered)]
        kept = unseal_messages(sealed)
        said = [one for one in self._gathered if one.role == "user"]
        words = [without_media(one.content, one.media) for one in said] if kept is None else []
        messages = summary_messages(unseal(sealed) or "", words) if kept is None else kept
        made = [GatheredMessage.of(message) for message in messages]
        for one in made[bool(words) :]:
            one.items = [entry(id, one.content)]
        made[1].items = [entry(id, made[1].content, "completed", sealed)]
        self._gathered = [*leading, *made]
        self.waiting.clear()
        for message in messages:
            new = {call.id for call in message.tool_calls}
            self.calls |= new
            self.waiting |= new
            self.waiting.discard(message.tool_call_id)

    def _answer(self, call_id: str, where: str) -> None:
        if call_id not in self.waiting:
            raise call_id_error(where, "must be that of an earlier function call that has no output yet")
        self.waiting.discard(call_id)

    def go_on(self) -> None:
        """Behind a summary, the user says to go on: a summary answers a question and is no beginning of a reply."""
        last = self._gathered[-1] if self._gathered else None
        if last is not None and last.role == "assistant" and last.items and kind_of(last.items[0]) == "cmp":
            self._gathered.append(GatheredMessage("user", GO_ON, items=[entry(last.items[0][0], GO_ON)]))

    def _begin_answer(self) -> None:
        """The last message cannot go on where it says or calls something."""
        self.go_on()
        if self._gathered and (self._gathered[-1].content or self._gathered[-1].calls):
            self._gathered.append(GatheredMessage("assistant"))

    def _reply(self, made: Entry) -> GatheredMessage:
        """The assistant's message that goes on, with one more item."""
        self.go_on()
        if not self._gathered or self._gathered[-1].role != "assistant":
            self._gathered.append(GatheredMessage("assistant"))
        self._gathered[-1].items.append(made)
        return self._gathered[-1]


def call_id_error(where: str, problem: str) -> ApiError:
    """400 for an item's ``call_id``."""
    return bad_request(f"{where}.call_id {problem}.", f"{where}.call_id", "invalid_value")


def key_of(item: AnyCall) -> ToolKey:
    match item:
        case CallItem() | CustomCallItem():
            return ToolKey("fc" if isinstance(item, CallItem) else "ctc", item.name, item.namespace or "")
        case SearchCallItem():
            return SEARCH
        case _:
            return SHELL


def call_entry(id: str, key: ToolKey, name: str, status: Status) -> Entry:
    """The entry of a call; it has the tool's own name where that of the function differs."""
    return entry(id, "", status, *(() if key == ToolKey("fc", name) else (key.name, key.namespace)))
