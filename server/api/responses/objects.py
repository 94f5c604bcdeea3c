"""Structs of the answers about responses and conversations. Times are Unix seconds."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from server.schemas.items import Item
from server.schemas.objects import CacheReceipt

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class InputDetails(msgspec.Struct, frozen=True):
    """``cached_tokens`` came from the cache, ``cache_write_tokens`` were computed and are in it now."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(msgspec.Struct, frozen=True):
    """``reasoning_tokens`` were thought."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ConversationRef(msgspec.Struct, frozen=True):
    """The conversation of a response."""

    id: str


class ReasoningConfig(msgspec.Struct, frozen=True):
    """What was asked for, about reasoning."""

    effort: str | None = None
    summary: str | None = None


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="response"):
    """A response. What the request asked for is told as it was honoured. ``cache`` is our receipt: what the input cost,
    there with the end of the response."""

    id: str
    created_at: int
    status: ResponseStatus
    background: bool
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: ConversationRef | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    reasoning: ReasoningConfig
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]
    cache: CacheReceipt | UnsetType | None = UNSET


class CompactedResponse(msgspec.Struct, frozen=True, tag_field="object", tag="response.compaction"):
    """A conversation that was summarised: what takes its place in the input of later requests."""

    id: str
    created_at: int
    output: list[Item]
    usage: ResponseUsage


class InputTokens(msgspec.Struct, frozen=True, tag_field="object", tag="response.input_tokens"):
    """How many tokens an input has."""

    input_tokens: int


class ConversationObject(msgspec.Struct, frozen=True, tag_field="object", tag="conversation"):
    """A conversation."""

    id: str
    created_at: int
    metadata: dict[str, str]
