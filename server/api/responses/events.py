"""Structs of the events of a streamed response. ``sequence_number`` counts all events of a response from 0."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from server.api.responses.objects import ResponseObject
from server.schemas.items import Item, ItemLogprob, OutputText, ReasoningText


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What all events have: a ``type``, their tag, and a number."""

    sequence_number: int


class State(Event, frozen=True, kw_only=True):
    """An event that carries the whole response as it is by then."""

    response: ResponseObject


class Created(State, frozen=True, kw_only=True, tag="response.created"):
    """The first event."""


class Queued(State, frozen=True, kw_only=True, tag="response.queued"):
    """A response in the background, before it runs."""


class InProgress(State, frozen=True, kw_only=True, tag="response.in_progress"):
    """It runs."""


class Completed(State, frozen=True, kw_only=True, tag="response.completed"):
    """The end: all went well, and is durable."""


class Incomplete(State, frozen=True, kw_only=True, tag="response.incomplete"):
    """The end: there was no room for more tokens, or, with the status ``cancelled``, it was cancelled. There is no
    event of OpenAI's for the latter, and every client knows this one as an end."""


class Failed(State, frozen=True, kw_only=True, tag="response.failed"):
    """The end: see its error."""


class ErrorEvent(Event, frozen=True, kw_only=True, tag="error"):
    """Something went wrong; ``response.failed`` follows."""

    code: str | None
    message: str
    param: str | None


class ItemAdded(Event, frozen=True, kw_only=True, tag="response.output_item.added"):
    """An item begins."""

    output_index: int
    item: Item


class ItemDone(Event, frozen=True, kw_only=True, tag="response.output_item.done"):
    """An item is whole."""

    output_index: int
    item: Item


class OfItem(Event, frozen=True, kw_only=True):
    """What the events within an item have."""

    item_id: str
    output_index: int


class PartAdded(OfItem, frozen=True, kw_only=True, tag="response.content_part.added"):
    """A part of an item's content begins."""

    content_index: int = 0
    part: OutputText | ReasoningText


class PartDone(OfItem, frozen=True, kw_only=True, tag="response.content_part.done"):
    """A part is whole."""

    content_index: int = 0
    part: OutputText | ReasoningText


class OutputTextDelta(OfItem, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """More of the answer."""

    content_index: int = 0
    delta: str
    logprobs: list[ItemLogprob] = []
    obfuscation: str | UnsetType = UNSET


class OutputTextDone(OfItem, frozen=True, kw_only=True, tag="response.output_text.done"):
    """All of it."""

    content_index: int = 0
    text: str
    logprobs: list[ItemLogprob] = []


class ReasoningDelta(OfItem, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """More of what is thought."""

    content_index: int = 0
    delta: str
    obfuscation: str | UnsetType = UNSET


class ReasoningDone(OfItem, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """All of it."""

    content_index: int = 0
    text: str


class ArgumentsDelta(OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str
    obfuscation: str | UnsetType = UNSET


class ArgumentsDone(OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    """All of them."""

    name: str
    arguments: str
