"""Request schemas of items, and their translation to logged messages."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from server.errors import ApiError, bad_request
from server.log.logged_message import LoggedCall, LoggedFunction, LoggedMessage, Role
from server.schemas.items import (
    CallItem,
    CallOutputItem,
    Entry,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    entry,
    new_id,
)
from server.schemas.messages import MAX_MESSAGES, NAME, CallArguments, Id
from server.schemas.strict import Strict, missing, wrong

MAX_PARTS = 1000
SEAL = "wt1:"  # in front of reasoning that a client keeps for us
MAX_SEALED = 2**20  # bytes of it
MAX_RATIO = 16  # of a text to what it is packed as: a request can hold thousands, and is not to grow to gigabytes
OTHER_PARTS = frozenset({"input_image", "input_file", "input_audio", "computer_screenshot"})
KINDS = frozenset({"message", "function_call", "function_call_output", "reasoning", "item_reference"})
ItemStatus = Literal["in_progress", "completed", "incomplete"]


def only_text(value: object) -> object:
    """Refuse content types that only other servers support, with an error that says so."""
    if isinstance(value, str) and value in OTHER_PARTS:
        raise ValueError("names a kind of content that is not supported by this server: only text is")
    return value


class Part(Strict):
    """A piece of text; ``annotations`` and ``logprobs`` are what clients send back of an earlier reply, and ``parsed``
    what they have made of it."""

    LATER: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **dict.fromkeys(("image_url", "file_id", "file_data", "file_url", "filename", "detail", "input_audio"), ()),
        "prompt_cache_breakpoint": (),
    }
    type: Annotated[
        Literal["input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"],
        BeforeValidator(only_text),
    ]
    text: str | None = None
    refusal: str | None = None
    annotations: list[object] = Field(default_factory=list, max_length=MAX_PARTS)
    logprobs: list[object] = Field(default_factory=list)
    parsed: object = None

    @model_validator(mode="after")
    def has_its_text(self) -> Self:
        """The field that the type names."""
        name = "refusal" if self.type == "refusal" else "text"
        if getattr(self, name) is None:
            raise missing(name)
        return self

    @property
    def plain(self) -> str:
        """What it says."""
        return self.text or self.refusal or ""


Parts = Annotated[list[Part], Field(max_length=MAX_PARTS), Field(fail_fast=True)]
Text = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Parts, Tag("<parts>")],
    Discriminator(lambda value: "<parts>" if isinstance(value, list) else "<text>"),
]


def texts(content: str | list[Part]) -> list[str]:
    """The pieces of a content."""
    return [content] if isinstance(content, str) else [part.plain for part in content]


class InputMessage(Strict):
    """A message, also one of an earlier reply. An ``id`` that comes along is not kept."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text
    id: Id | None = None
    status: ItemStatus | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    def to_item(self, session: str | None) -> Item:
        """The item that it becomes."""
        parts = texts(self.content)
        if self.role == "assistant":
            return MessageItem(new_id("msg", session), self.role, [OutputText(text) for text in parts])
        return MessageItem(new_id("msg", session), self.role, [InputText(text) for text in parts])


class InputCall(Strict):
    """A call of an earlier reply. ``parsed_arguments`` are what a client has made of the arguments."""

    LATER: ClassVar[Mapping[str, tuple[object, ...]]] = {"caller": (), "async": (False,)}
    type: Literal["function_call"]
    call_id: Id
    name: Annotated[str, Field(pattern=NAME)]
    arguments: CallArguments
    parsed_arguments: object = None
    id: Id | None = None
    status: ItemStatus | None = None
    namespace: None = None

    def to_item(self, session: str | None) -> Item:
        """The item that it becomes."""
        return CallItem(new_id("fc", session), self.call_id, self.name, self.arguments)


class InputCallOutput(Strict):
    """What a function gave back."""

    LATER: ClassVar[Mapping[str, tuple[object, ...]]] = {"caller": (), "name": (), "namespace": ()}
    type: Literal["function_call_output"]
    call_id: Id
    output: Text
    id: Id | None = None
    status: ItemStatus | None = None

    def to_item(self, session: str | None) -> Item:
        """The item that it becomes."""
        given = self.output if isinstance(self.output, str) else [InputText(text) for text in texts(self.output)]
        return CallOutputItem(new_id("fco", session), self.call_id, given)


class InputReasoning(Strict):
    """What an earlier reply thought: ``content``, or sealed where a client asked for that. A summary is not used."""

    type: Literal["reasoning"]
    summary: Parts = Field(default_factory=list)
    content: Parts = Field(default_factory=list)
    encrypted_content: str | None = None
    id: Id | None = None
    status: ItemStatus | None = None

    @model_validator(mode="after")
    def is_ours(self) -> Self:
        """Nobody can open what others have sealed."""
        if self.encrypted_content is not None and unseal(self.encrypted_content) is None:
            raise wrong("encrypted_content", "was not made by this server")
        return self

    def to_item(self, session: str | None) -> Item:
        """The item that it becomes."""
        parts = texts(self.content)
        if not parts and self.encrypted_content is not None:
            parts = [unseal(self.encrypted_content) or ""]
        return ReasoningItem(new_id("rs", session), [ReasoningText(text) for text in parts])


class Reference(Strict):
    """An item that is somewhere already, to be read here again."""

    type: Literal["item_reference"] = "item_reference"
    id: Id


def kind(value: object) -> str:
    """The item's type, for the union."""
    if not isinstance(value, dict):
        return "<message>"
    named = value.get("type")
    if named is None:
        return "<message>" if "role" in value or "content" in value or "id" not in value else "<item_reference>"
    return f"<{named}>" if isinstance(named, str) and named in KINDS else "<unknown>"


class Unknown(InputMessage):
    """Items of types that only other servers support: they are refused."""

    @model_validator(mode="before")
    @classmethod
    def only_known(cls, data: object) -> object:
        raise wrong("type", "names a kind of item that this server does not support")


InputItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[InputCall, Tag("<function_call>")]
    | Annotated[InputCallOutput, Tag("<function_call_output>")]
    | Annotated[InputReasoning, Tag("<reasoning>")]
    | Annotated[Reference, Tag("<item_reference>")]
    | Annotated[Unknown, Tag("<unknown>")],
    Discriminator(kind),
]
Items = Annotated[list[InputItem], Field(max_length=MAX_MESSAGES), Field(fail_fast=True)]


# --- what a client keeps for us ---------------------------------------------------------------------------------


def seal(text: str) -> str:
    """Reasoning as ``encrypted_content``: encoded, but not secret."""
    data = text.encode()
    packed = zlib.compress(data)
    if len(packed) * MAX_RATIO < len(data):
        packed = zlib.compress(data, level=0)
    return SEAL + base64.b64encode(packed).decode()


def unseal(told: str) -> str | None:
    """The inverse of ``seal``; None for other text, or if it is larger than a request may be."""
    try:
        packed = base64.b64decode(told.removeprefix(SEAL), validate=True)
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, min(MAX_SEALED, max(1, MAX_RATIO * len(packed))))
        whole = told.startswith(SEAL) and unpacker.eof
        return data.decode() if whole else None
    except (binascii.Error, zlib.error, ValueError):
        return None


# --- items as messages --------------------------------------------------------------------------------------------


@dataclass
class GatheredMessage:
    """A message that is being assembled from items."""

    role: Role
    content: str = ""
    thoughts: list[str] = field(default_factory=list)
    calls: list[LoggedCall] = field(default_factory=list)
    call_id: str = ""
    items: list[Entry] = field(default_factory=list)

    @property
    def logged(self) -> LoggedMessage:
        """The logged message."""
        return LoggedMessage(
            self.role,
            self.content,
            reasoning_content="".join(self.thoughts),
            tool_calls=self.calls,
            tool_call_id=self.call_id,
            items=self.items,
        )


@dataclass
class Gathering:
    """Assembles messages from items: successive reasoning, text and calls of the assistant become one message.
    ``calls`` are the ids of all calls so far, ``waiting`` those without an output.
    """

    calls: set[str] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)
    _gathered: list[GatheredMessage] = field(default_factory=list)

    @classmethod
    def after(cls, past: Sequence[LoggedMessage]) -> Gathering:
        """A Gathering that continues these messages."""
        made = cls()
        for message in past:
            for call in message.tool_calls:
                made.calls.add(call.id)
                made.waiting.add(call.id)
            made.waiting.discard(message.tool_call_id)
        return made

    @property
    def messages(self) -> list[LoggedMessage]:
        """The messages so far."""
        return [message.logged for message in self._gathered]

    def add(self, item: Item, where: str) -> None:
        """Add one item; ``where`` is its place in the request, for errors. Raises a 400 for outputs without a call, and
        for duplicate calls.
        """
        match item:
            case CallOutputItem(id, call_id, output):
                self._answer(call_id, where)
                text = output if isinstance(output, str) else "\n".join(part.text for part in output)
                self._gathered.append(GatheredMessage("tool", text, call_id=call_id, items=[entry(id, text)]))
            case CallItem(id, call_id, name, arguments, status):
                if call_id in self.calls:
                    raise call_id_error(where, "was already used by an earlier call")
                self.calls.add(call_id)
                self.waiting.add(call_id)
                call = LoggedCall(call_id, "function", LoggedFunction(name, arguments))
                self._reply(entry(id, "", status)).calls.append(call)
            case ReasoningItem(id, content, status=status):
                text = "\n".join(part.text for part in content)
                self._begin_answer()
                self._reply(entry(id, text, status)).thoughts.append(text)
            case MessageItem(id, "assistant", content, status):
                text = "\n".join(part.text for part in content)
                self._begin_answer()
                self._reply(entry(id, text, status)).content += text
            case MessageItem(id, role, content):
                text = "\n".join(part.text for part in content)
                self._gathered.append(GatheredMessage(role, text, items=[entry(id, text)]))

    def _answer(self, call_id: str, where: str) -> None:
        if call_id not in self.waiting:
            raise call_id_error(where, "must be that of an earlier function call that has no output yet")
        self.waiting.discard(call_id)

    def _begin_answer(self) -> None:
        """The last message cannot go on where it says or calls something."""
        if self._gathered and (self._gathered[-1].content or self._gathered[-1].calls):
            self._gathered.append(GatheredMessage("assistant"))

    def _reply(self, made: Entry) -> GatheredMessage:
        """The assistant's message that goes on, with one more item."""
        if not self._gathered or self._gathered[-1].role != "assistant":
            self._gathered.append(GatheredMessage("assistant"))
        self._gathered[-1].items.append(made)
        return self._gathered[-1]


def call_id_error(where: str, problem: str) -> ApiError:
    """400 for an item's ``call_id``."""
    return bad_request(f"{where}.call_id {problem}.", f"{where}.call_id", "invalid_value")
