"""Structs of the events of a streamed response. ``sequence_number`` counts all events of a response from 0."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from server.api.responses.objects import ResponseObject
from server.schemas.item_texts import ItemLogprob, OutputText, ReasoningText
from server.schemas.items import Item


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base class of all events: a ``type`` and a number."""

    sequence_number: int


class State(Event, frozen=True, kw_only=True):
    """An event with the whole response in its current state."""

    response: ResponseObject


class Created(State, frozen=True, kw_only=True, tag="response.created"):
    """The first event."""


class Queued(State, frozen=True, kw_only=True, tag="response.queued"):
    """A background response waits to run."""


class InProgress(State, frozen=True, kw_only=True, tag="response.in_progress"):
    """The response runs."""


class Completed(State, frozen=True, kw_only=True, tag="response.completed"):
    """The end: the response is complete and committed."""


class Incomplete(State, frozen=True, kw_only=True, tag="response.incomplete"):
    """The end: the token limit was reached or, with the status ``cancelled``, the response was cancelled. OpenAI has no
    event for the latter, and all clients treat this one as an end.
    """


class Failed(State, frozen=True, kw_only=True, tag="response.failed"):
    """The end: the response has an error."""


class ErrorEvent(Event, frozen=True, kw_only=True, tag="error"):
    """An error; ``response.failed`` follows."""

    code: str | None
    message: str
    param: str | None


class ItemAdded(Event, frozen=True, kw_only=True, tag="response.output_item.added"):
    """An item begins."""

    output_index: int
    item: Item


class ItemDone(Event, frozen=True, kw_only=True, tag="response.output_item.done"):
    """An item is complete."""

    output_index: int
    item: Item


class Compacting(Event, frozen=True, kw_only=True, tag="response.compaction.compacting"):
    """More of a summary that the request asks for was generated; it is in the item when this is complete."""

    item_id: str
    output_index: int


class OfItem(Event, frozen=True, kw_only=True):
    """The fields of events within an item."""

    item_id: str
    output_index: int


class PartAdded(OfItem, frozen=True, kw_only=True, tag="response.content_part.added"):
    """A part of an item's content begins."""

    content_index: int = 0
    part: OutputText | ReasoningText


class PartDone(OfItem, frozen=True, kw_only=True, tag="response.content_part.done"):
    """A part is complete."""

    content_index: int = 0
    part: OutputText | ReasoningText


class OutputTextDelta(OfItem, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """Text that is appended to the answer."""

    content_index: int = 0
    delta: str
    logprobs: list[ItemLogprob] = []
    obfuscation: str | UnsetType = UNSET


class OutputTextDone(OfItem, frozen=True, kw_only=True, tag="response.output_text.done"):
    """The whole text."""

    content_index: int = 0
    text: str
    logprobs: list[ItemLogprob] = []


class ReasoningDelta(OfItem, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """Text that is appended to the reasoning."""

    content_index: int = 0
    delta: str
    obfuscation: str | UnsetType = UNSET


class ReasoningDone(OfItem, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """The whole reasoning."""

    content_index: int = 0
    text: str


class ArgumentsDelta(OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    """JSON that is appended to a call's arguments."""

    delta: str
    obfuscation: str | UnsetType = UNSET


class ArgumentsDone(OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    """The whole arguments."""

    name: str
    arguments: str


class CustomInputDelta(OfItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta"):
    """Text that is appended to the input of a custom tool's call."""

    delta: str
    obfuscation: str | UnsetType = UNSET


class InputDone(OfItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done"):
    """The whole input."""

    input: str
