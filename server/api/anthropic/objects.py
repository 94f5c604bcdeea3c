"""Structs of Anthropic's responses: messages, stream events and token counts."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from server.schemas.objects import CacheReceipt

# The last is not Anthropic's: only ``POST /v1/sessions/{id}/cancel`` ends a message so.
StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "compaction", "model_context_window_exceeded", "cancelled"
]


class CacheCreation(msgspec.Struct, frozen=True):
    """Tokens that were computed to be cached, by how long they are kept."""

    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class ThinkingTokens(msgspec.Struct, frozen=True):
    """How many of the generated tokens are reasoning."""

    thinking_tokens: int


class IterationUsage(msgspec.Struct, frozen=True):
    """Tokens of one part of a request: of a summary, or of the reply."""

    type: Literal["compaction", "message"]
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation: CacheCreation


class AnthropicUsage(msgspec.Struct, frozen=True):
    """Tokens of a request. The prompt is the sum of three: computed tokens, tokens computed by a request that asks for
    them to be cached, and tokens read from the cache. All are those of the reply; ``iterations`` has those of summaries
    too, where there are any.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation: CacheCreation
    output_tokens_details: ThinkingTokens
    service_tier: Literal["standard"] = "standard"
    iterations: list[IterationUsage] | UnsetType = UNSET


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A block of text."""

    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """A block of reasoning. Its signature is always empty."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A tool call."""

    id: str
    name: str
    input: dict[str, Any]


class CompactionBlock(msgspec.Struct, frozen=True, tag_field="type", tag="compaction"):
    """A summary of what came before it. ``encrypted_content`` has the newest messages too; it is encoded, but not
    secret.
    """

    content: str | None = None
    encrypted_content: str | None = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | CompactionBlock


ChangedPart = Literal["model_changed", "system_changed", "tools_changed", "messages_changed"]


class ChangeReason(msgspec.Struct, frozen=True):
    """A part of the request differs from that of an earlier one. ``cache_missed_input_tokens``: tokens of the earlier
    prompt that were computed again.
    """

    type: ChangedPart
    cache_missed_input_tokens: int


class UnknownReason(msgspec.Struct, frozen=True):
    """Nothing can be said: the earlier message is not known, or the difference is another one."""

    type: Literal["previous_message_not_found", "unavailable"]


class Diagnostics(msgspec.Struct, frozen=True):
    """Why less was reused than of the request of an earlier message."""

    cache_miss_reason: ChangeReason | UnknownReason


class AppliedEdits(msgspec.Struct, frozen=True):
    """Which edits of the request's ``context_management`` have changed its history."""

    applied_edits: list[dict[str, Any]]


class Message(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """A reply, complete or at the start of a stream."""

    id: str
    model: str
    content: list[Block]
    usage: AnthropicUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"
    session_id: str | UnsetType = UNSET
    cache: CacheReceipt | UnsetType | None = UNSET
    context_management: AppliedEdits | UnsetType = UNSET
    diagnostics: Diagnostics | UnsetType | None = UNSET


class OriginalTokens(msgspec.Struct, frozen=True):
    """The length of a prompt before its edits."""

    original_input_tokens: int


class TokenCount(msgspec.Struct, frozen=True):
    """The length of a prompt."""

    input_tokens: int
    context_management: OriginalTokens | UnsetType = UNSET


# --- streams ------------------------------------------------------------------------------------------------


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    """The first event of a stream."""

    message: Message


class Ping(msgspec.Struct, frozen=True, tag_field="type", tag="ping"):
    """A keep-alive event."""


class BlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    """A block begins; it is empty."""

    index: int
    content_block: Block


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    """Text that is appended to a block."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    """Reasoning that is appended to a block."""

    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    """The signature at the end of a block of reasoning."""

    signature: str = ""


class InputDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    """JSON that is appended to a call's input."""

    partial_json: str


class CompactionDelta(msgspec.Struct, frozen=True, tag_field="type", tag="compaction_delta"):
    """A whole compaction."""

    content: str | None
    encrypted_content: str | None


BlockPiece = TextDelta | ThinkingDelta | SignatureDelta | InputDelta | CompactionDelta


class BlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    """An addition to a block."""

    index: int
    delta: BlockPiece


class BlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    """A block is complete."""

    index: int


class End(msgspec.Struct, frozen=True):
    """The reason why a reply ended."""

    stop_reason: StopReason
    stop_sequence: str | None = None


class MessageDelta(msgspec.Struct, frozen=True, tag_field="type", tag="message_delta"):
    """The end of a reply, with its usage."""

    delta: End
    usage: AnthropicUsage
    cache: CacheReceipt | UnsetType | None = UNSET
    context_management: AppliedEdits | UnsetType = UNSET


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    """The last event of a stream."""


# --- errors -------------------------------------------------------------------------------------------------
