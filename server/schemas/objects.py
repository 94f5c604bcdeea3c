"""Structs of OpenAI's answers. There is one per generated token, so they are msgspec structs, which encode in under a
microsecond.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from cache.tier import Tier
from scheduler.turn_receipt import Miss
from server.schemas.adaptations import Adaptation

# The last is not OpenAI's: only ``POST /v1/sessions/{id}/cancel`` and its like end a reply so.
Finish = Literal["stop", "length", "tool_calls", "cancelled"]


class CachedTokens(msgspec.Struct, frozen=True):
    """How many prompt tokens came from the session's cache; and how many stand for pictures, sounds or videos, if there
    are any.
    """

    cached_tokens: int
    image_tokens: int | UnsetType = UNSET
    audio_tokens: int | UnsetType = UNSET
    video_tokens: int | UnsetType = UNSET

    @classmethod
    def with_media(cls, cached: int, rows: Mapping[str, int]) -> CachedTokens:
        """Of prompts with so many rows of media of each kind."""
        return cls(cached, *(rows.get(kind) or UNSET for kind in ("image", "audio", "video")))


class DraftCounts(msgspec.Struct, frozen=True):
    """Tokens that were drafted, and how many of these are in the reply."""

    drafted: int
    accepted: int


class CompletionTokens(msgspec.Struct, frozen=True):
    """How many generated tokens were reasoning; and how many tokens of the client's prediction were fed as drafts, and
    accepted or rejected. Rejected ones are not part of the reply and are not counted in ``completion_tokens``.
    ``speculation``: all drafted tokens, by source, if there are any.
    """

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    speculation: dict[str, DraftCounts] | UnsetType = UNSET


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a whole request; each prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionTokens = CompletionTokens()


class MissReason(StrEnum):
    """Why not more was reused: what the server sees in the log, then what the engine tells (``Miss``)."""

    FINGERPRINT = "fingerprint"  # the log was written under another tokenizer or template
    EDITED_HISTORY = "edited_history"  # the client's history is not the logged one
    TEMPLATE_DRIFT = "template_drift"  # it is, and yet it has become other tokens
    EVICTED = Miss.EVICTED.value
    DAMAGED = Miss.DAMAGED.value
    CHEAPER = Miss.CHEAPER.value
    NO_ROOM = Miss.NO_ROOM.value
    NO_CHECKPOINT = Miss.NO_CHECKPOINT.value
    WINDOW = Miss.WINDOW.value
    ADAPTER = Miss.ADAPTER.value
    DIVERGED = Miss.DIVERGED.value


class TokenText(msgspec.Struct, frozen=True):
    """A token of the served model."""

    id: int
    text: str


class CacheMiss(msgspec.Struct, frozen=True):
    """Why not more was reused. ``at`` is the index of the first token of the prompt that had to be computed, or where
    the prompt differs from what was cached (then ``got`` and ``expected`` are the two tokens) that of the first
    different one.
    """

    reason: MissReason
    at: int
    got: TokenText | None = None
    expected: TokenText | None = None


LineOutcome = Literal["continued", "forked", "begun", "rewritten", "side", "busy"]


class LineReceipt(msgspec.Struct, frozen=True):
    """The line that a request was recognised as part of. ``via``: the header or field with the client's hint;
    ``turns``: how many logged turns the prompt begins with; ``id``: the session that took the turn or, where
    ``outcome`` is ``side`` or ``busy``, the one that the prompt begins with.
    """

    outcome: LineOutcome
    via: str
    turns: int
    id: str | UnsetType = UNSET


CompactionReason = Literal["threshold", "context", "request"]


class CompactionReceipt(msgspec.Struct, frozen=True):
    """Messages that a summary stands for from this request on. ``reason``: the client's threshold was passed, the
    prompt did not fit the context, or the request asks for it. ``messages``: how many were summarised, in ``summaries``
    parts. The tokens are those of these parts: of their prompts, how many of them were cached, and of what was written;
    where the response itself is a summary, that one is in its own usage. ``kept``: a session with the conversation as
    it was, where this request's own session goes on without it.
    """

    reason: CompactionReason
    messages: int
    summaries: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    kept: str | UnsetType = UNSET


class PictureCounts(msgspec.Struct, frozen=True):
    """Pictures of a prompt: those that the encoder was run on for this turn, and the others."""

    encoded: int
    reused: int


class CacheReceipt(msgspec.Struct, frozen=True):
    """What the prompts of a request cost; each counts once. ``reused`` tokens were not computed, by the tier that had
    them; every tier is named. ``recomputed`` tokens had been computed for this session before, ``new`` ones had not.
    ``prefill_ms`` is from admission to first token; null when none was generated. ``max_tokens``: what was left of the
    context, where the request allowed more than that. ``ignored``: unknown fields that were left out of the request;
    ``adapted``: what of it was taken otherwise than it is written. ``line``: for a request with a hint of its
    conversation. ``compaction``: where older messages were summarised. ``thinking_budget_spent``: the budget for
    reasoning was spent, in one choice at least, and the end of the reasoning was forced. ``speculation``: what was
    drafted for the reply, by source. ``pictures``: where a prompt has some. ``decode_ms`` is from the first token to
    the last; absent where there is but one.
    """

    prompt_tokens: int
    reused: dict[Tier, int]
    recomputed: int
    new: int
    load_ms: float
    prefill_ms: float | None = None
    miss: CacheMiss | None = None
    max_tokens: int | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET
    adapted: list[Adaptation] | UnsetType = UNSET
    line: LineReceipt | UnsetType = UNSET
    compaction: CompactionReceipt | UnsetType = UNSET
    thinking_budget_spent: bool | UnsetType = UNSET
    speculation: dict[str, DraftCounts] | UnsetType = UNSET
    pictures: PictureCounts | UnsetType = UNSET
    decode_ms: float | UnsetType = UNSET


# --- chats --------------------------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct, frozen=True):
    """One alternative. ``bytes`` are the token's own, as text alone cannot hold half a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    """One generated token with its alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class PromptLogprob(msgspec.Struct, frozen=True):
    """What is told of one token at one place of a prompt, as vLLM has it. ``rank`` 1 is the likeliest; null: beyond the
    alternatives that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


class ChatLogprobs(msgspec.Struct, frozen=True):
    """``logprobs`` of a chat's choice: one entry per generated token, the one that ended it included."""

    content: list[ChatLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """What is called; ``arguments`` is text, JSON if all went well."""

    name: str
    arguments: str


class CalledCustom(msgspec.Struct, frozen=True):
    """A custom tool that is called, with its text."""

    name: str
    input: str


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool: of a ``function`` or of a ``custom`` one."""

    id: str
    function: CalledFunction | UnsetType = UNSET
    custom: CalledCustom | UnsetType = UNSET
    type: Literal["function", "custom"] = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """The reply. ``content`` is null when there is nothing but calls."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    annotations: tuple[()] = ()


class ChatChoice(msgspec.Struct, frozen=True):
    """One reply of a chat."""

    index: int
    message: ChatMessage
    finish_reason: Finish
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, tag_field="object", tag="chat.completion"):
    """The body of an answered chat."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    cache: CacheReceipt | None
    system_fingerprint: str
    session_id: str | UnsetType = UNSET
    service_tier: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, frozen=True):
    """More of a call: its name when it begins, then pieces of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class CustomDelta(msgspec.Struct, frozen=True):
    """More of a call of a custom tool: its name when it begins, then pieces of its input."""

    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True):
    """More of the ``index``-th call of a reply; id and type when it begins."""

    index: int
    function: FunctionDelta | UnsetType = UNSET
    custom: CustomDelta | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True):
    """What a chunk adds to the reply."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """A chunk's one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, tag_field="object", tag="chat.completion.chunk"):
    """One event of a streamed chat."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    session_id: str | UnsetType = UNSET
    cache: CacheReceipt | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET
    obfuscation: str | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


# --- completions --------------------------------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """``logprobs`` of a completion: parallel lists. ``text_offset`` counts characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One continuation of a prompt, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, tag_field="object", tag="text_completion"):
    """The body of an answered completion, and each event of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    session_id: str | UnsetType = UNSET
    cache: CacheReceipt | UnsetType | None = UNSET
    obfuscation: str | UnsetType = UNSET
