"""Writes a reply in Anthropic's format: the events of a stream, block by block, or one message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from scheduler.protocol import Delta
from server.api.anthropic import objects as objects
from server.api.anthropic.diagnostics import Diagnosis
from server.chat.partial_reply import PartialReply
from server.chat.reply_parser import ArgumentsPiece, CallStart, ContentPiece, Part, ReasoningPiece
from server.errors import ApiError
from server.http.anthropic_errors import error_body
from server.http.sse import frame_event
from server.schemas.objects import CacheReceipt
from server.schemas.objects import Usage as TurnUsage
from server.turns.call_deltas import arguments_object
from server.turns.replies import CacheField, Reply, ReplyHead, UsageField, UsageOptions, encoder

AT_ALL_TIMES = UsageOptions(at_end=True, everywhere=True, elsewhere=None)
HOUR = 3600  # seconds


class AnthropicReply(Reply):
    """Writes a message. ``keep_seconds``: how long the request asks its KV to be kept; ``limit``: its most tokens;
    ``shows_thoughts``: whether blocks of reasoning have their text; ``stops``: its stop sequences; ``edits``: those of
    its history that were applied, where it asks for some; ``diagnosis``: that of its prompt, likewise. ``compaction``:
    the block that the message begins with, where the conversation was compacted, and the usage of its summaries.
    """

    done = b""

    def __init__(
        self,
        head: ReplyHead,
        request_id: str | None,
        keep_seconds: int,
        limit: int | None,
        shows_thoughts: bool,
        stops: Sequence[str] = (),
        edits: objects.AppliedEdits | UnsetType = UNSET,
        diagnosis: Diagnosis | None = None,
        compaction: tuple[objects.CompactionBlock, Sequence[TurnUsage]] | None = None,
    ) -> None:
        super().__init__(head, AT_ALL_TIMES)
        self._request_id = request_id
        self._keep_seconds = keep_seconds
        self._limit = limit
        self._shows_thoughts = shows_thoughts
        self._stops = stops
        self._edits = edits
        self._diagnosis = diagnosis
        self._block: objects.CompactionBlock | None = None if compaction is None else compaction[0]
        self._summaries: Sequence[TurnUsage] = () if compaction is None else compaction[1]
        self._blocks = 0  # begun so far
        self._open: type[Part] | None = None  # what the last of them is made of

    def encode_event(self, told: msgspec.Struct) -> bytes:
        return named_event(told)

    def encode_failure(self, error: ApiError) -> bytes:
        return named_event(error_body(error.status_code, error.detail, self._request_id))

    def open_choice(self, index: int, usage: UsageField) -> Sequence[msgspec.Struct]:
        start = objects.MessageStart(self._diagnose(self._message([], self._usage(usage))))
        return [start, objects.Ping(), *self._write_compaction()]

    def write_delta(
        self, index: int, delta: Delta, parts: Sequence[Part], usage: UsageField
    ) -> Sequence[msgspec.Struct]:
        return [told for part in parts for told in self._write_part(part)]

    def end_choice(
        self, index: int, partial_reply: PartialReply, usage: UsageField, cache: CacheField
    ) -> Sequence[msgspec.Struct]:
        end = objects.End(*self._stop_reason(partial_reply))
        return [*self._close_block(), objects.MessageDelta(end, self._usage(usage), cache, self._edits)]

    def end_stream(
        self, partial_replies: Sequence[PartialReply], usage: TurnUsage, cache: CacheField
    ) -> Sequence[msgspec.Struct]:
        return [objects.MessageStop()]

    def write_body(
        self, partial_replies: Sequence[PartialReply], usage: TurnUsage, cache: CacheReceipt | None
    ) -> objects.Message:
        partial_reply = partial_replies[0]
        content: list[objects.Block] = [] if self._block is None else [self._block]
        if partial_reply.reasoning:
            content.append(objects.ThinkingBlock(partial_reply.reasoning if self._shows_thoughts else ""))
        if partial_reply.content:
            content.append(objects.TextBlock(partial_reply.content))
        content += [
            objects.ToolUseBlock(call.id, call.name, arguments_object(call.arguments)) for call in partial_reply.calls
        ]
        whole = self._message(content, self._usage(usage), *self._stop_reason(partial_reply), cache)
        return self._diagnose(msgspec.structs.replace(whole, context_management=self._edits))

    # --- the pieces of it -----------------------------------------------------------------------------------

    def _message(
        self,
        content: list[objects.Block],
        usage: objects.AnthropicUsage,
        reason: objects.StopReason | None = None,
        sequence: str | None = None,
        cache: CacheReceipt | UnsetType | None = UNSET,
    ) -> objects.Message:
        head = self.head
        return objects.Message(
            head.id, head.model, content, usage, reason, sequence, session_id=head.session, cache=cache
        )

    def _diagnose(self, message: objects.Message) -> objects.Message:
        """``message`` with the answer to the request's ``diagnostics``, if it has any."""
        if self._diagnosis is None:
            return message
        usage = message.usage
        cached = usage.cache_read_input_tokens
        tokens = usage.input_tokens + usage.cache_creation_input_tokens + cached
        return msgspec.structs.replace(message, diagnostics=self._diagnosis.answer(message.id, tokens, cached))

    def _write_compaction(self) -> list[msgspec.Struct]:
        """The block of a compaction, in one piece."""
        if self._block is None:
            return []
        self._blocks += 1
        return [*compaction_events(self._block)]

    def _write_part(self, part: Part) -> Iterator[msgspec.Struct]:
        match part:
            case ContentPiece(text):
                yield from self._open_block(ContentPiece, objects.TextBlock(""))
                yield self._block_delta(objects.TextDelta(text))
            case ReasoningPiece(text):
                yield from self._open_block(ReasoningPiece, objects.ThinkingBlock(""))
                if self._shows_thoughts:
                    yield self._block_delta(objects.ThinkingDelta(text))
            case CallStart(_, id, name):
                yield from self._close_block()
                yield from self._open_block(CallStart, objects.ToolUseBlock(id, name, {}))
            case ArgumentsPiece(_, text):
                yield self._block_delta(objects.InputDelta(text))

    def _open_block(self, kind: type[Part], block: objects.Block) -> Iterator[msgspec.Struct]:
        """Begin a block, unless one of its kind is open."""
        if self._open is not kind:
            yield from self._close_block()
            self._open = kind
            self._blocks += 1
            yield objects.BlockStart(self._blocks - 1, block)

    def _block_delta(self, piece: objects.BlockPiece) -> objects.BlockDelta:
        return objects.BlockDelta(self._blocks - 1, piece)

    def _close_block(self) -> Iterator[msgspec.Struct]:
        """End the block that is open, if one is."""
        if self._open is ReasoningPiece:
            yield self._block_delta(objects.SignatureDelta())
        if self._open is not None:
            yield objects.BlockStop(self._blocks - 1)
        self._open = None

    def _stop_reason(self, partial_reply: PartialReply) -> tuple[objects.StopReason, str | None]:
        """Why a reply ended, and the stop sequence that did it."""
        if partial_reply.finish == "tool_calls":
            return "tool_use", None
        if partial_reply.finish == "cancelled":
            return "cancelled", None
        if partial_reply.finish == "length":
            full = self._limit is not None and len(partial_reply.tokens) < self._limit
            return "model_context_window_exceeded" if full else "max_tokens", None
        named = (
            isinstance(partial_reply.stop, str) and partial_reply.stop in self._stops
        )  # one of the model's own is its end of a turn
        return ("stop_sequence", str(partial_reply.stop)) if named else ("end_turn", None)

    def _usage(self, usage: UsageField) -> objects.AnthropicUsage:
        assert isinstance(usage, TurnUsage)
        told = anthropic_usage(usage, self._keep_seconds)
        if not self._summaries:
            return told
        parts = [iteration("compaction", anthropic_usage(summary, 0)) for summary in self._summaries]
        return msgspec.structs.replace(told, iterations=[*parts, iteration("message", told)])


def anthropic_usage(usage: TurnUsage, keep_seconds: int) -> objects.AnthropicUsage:
    """Usage in Anthropic's format; what is computed is told as written to the cache if it is to be kept."""
    cached = usage.prompt_tokens_details.cached_tokens
    computed = usage.prompt_tokens - cached
    kept = computed if keep_seconds else 0
    long = keep_seconds >= HOUR
    return objects.AnthropicUsage(
        input_tokens=computed - kept,
        cache_creation_input_tokens=kept,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        cache_creation=objects.CacheCreation(0 if long else kept, kept if long else 0),
        output_tokens_details=objects.ThinkingTokens(usage.completion_tokens_details.reasoning_tokens),
    )


def iteration(kind: Literal["compaction", "message"], usage: objects.AnthropicUsage) -> objects.IterationUsage:
    """The usage of one part of a request."""
    return objects.IterationUsage(
        kind,
        usage.input_tokens,
        usage.cache_creation_input_tokens,
        usage.cache_read_input_tokens,
        usage.output_tokens,
        usage.cache_creation,
    )


def compaction_events(block: objects.CompactionBlock) -> Iterator[msgspec.Struct]:
    """The events of a compaction, the first block of a message."""
    yield objects.BlockStart(0, objects.CompactionBlock())
    yield objects.BlockDelta(0, objects.CompactionDelta(block.content, block.encrypted_content))
    yield objects.BlockStop(0)


def named_event(told: msgspec.Struct) -> bytes:
    """A server-sent event with the name of its type."""
    return b"event: " + str(told.__struct_config__.tag).encode() + b"\n" + frame_event(encoder.encode(told))
