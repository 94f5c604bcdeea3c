"""Writes replies in Ollama's format: lines of JSON, or one object."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from scheduler.protocol import Delta, TokenLogprob
from server.api.ollama.objects import (
    ChatPiece,
    DoneReason,
    GeneratePiece,
    Logprob,
    OllamaFunction,
    OllamaMessage,
    OllamaToolCall,
    Piece,
)
from server.api.openai.models import timestamp
from server.chat.partial_reply import ParsedCall, PartialReply
from server.chat.reply_parser import ContentPiece, Part, ReasoningPiece
from server.errors import ApiError
from server.http.ollama_errors import OllamaError
from server.schemas.objects import CacheReceipt, Usage
from server.schemas.vendor_fields import FLOOR
from server.turns.call_deltas import arguments_object
from server.turns.replies import CacheField, Reply, ReplyHead, UsageField, UsageOptions, encoder

NDJSON = "application/x-ndjson"
AT_ALL_TIMES = UsageOptions(at_end=True, everywhere=True, elsewhere=None)


class OllamaReply(Reply):
    """Writes a reply. ``logprobs``: whether it has log-probabilities; ``thinks``: whether reasoning is told;
    ``load_ns``: nanoseconds that its request waited for the model to be loaded.
    """

    done = b""
    media_type = NDJSON
    ping = None

    def __init__(self, head: ReplyHead, *, logprobs: bool, thinks: bool, load_ns: int = 0) -> None:
        super().__init__(head, AT_ALL_TIMES)
        self._logprobs = logprobs
        self._thinks = thinks
        self._load_ns = load_ns
        self._started = time.perf_counter_ns()
        self._answered: int | None = None  # when the first token came

    @abstractmethod
    def piece(self, content: str, thinking: str, calls: Sequence[OllamaToolCall]) -> Piece:
        """A line of the stream."""

    def encode_event(self, chunk: msgspec.Struct) -> bytes:
        return encoder.encode(chunk) + b"\n"

    def encode_failure(self, error: ApiError) -> bytes:
        return encoder.encode(OllamaError(error.detail)) + b"\n"

    def observe_delta(self, index: int, delta: Delta, parts: Sequence[Part]) -> None:
        if self._answered is None and delta.tokens:
            self._answered = time.perf_counter_ns()

    def open_choice(self, index: int, usage: UsageField) -> Sequence[msgspec.Struct]:
        return ()

    def write_delta(
        self, index: int, delta: Delta, parts: Sequence[Part], usage: UsageField
    ) -> Sequence[msgspec.Struct]:
        self.observe_delta(index, delta, parts)
        content = "".join(part.text for part in parts if isinstance(part, ContentPiece))
        thinking = "".join(part.text for part in parts if isinstance(part, ReasoningPiece)) if self._thinks else ""
        logprobs = self._entries(delta.logprobs)
        if not content and not thinking and not logprobs:
            return ()
        return [msgspec.structs.replace(self.piece(content, thinking, ()), logprobs=logprobs)]

    def end_choice(
        self, index: int, partial_reply: PartialReply, usage: UsageField, cache: CacheField
    ) -> Sequence[msgspec.Struct]:
        assert isinstance(usage, Usage)
        calls = tool_calls(partial_reply.calls)
        told = [self.piece("", "", calls)] if calls else []
        return [*told, self._finish_piece(self.piece("", "", ()), partial_reply, usage, cache)]

    def end_stream(
        self, partial_replies: Sequence[PartialReply], usage: Usage, cache: CacheField
    ) -> Sequence[msgspec.Struct]:
        return ()

    def write_body(
        self, partial_replies: Sequence[PartialReply], usage: Usage, cache: CacheReceipt | None
    ) -> msgspec.Struct:
        reply = partial_replies[0]
        thinking = reply.reasoning if self._thinks else ""
        whole = self.piece(reply.content, thinking, tool_calls(reply.calls))
        ended = self._finish_piece(whole, reply, usage, cache)
        return msgspec.structs.replace(ended, logprobs=self._entries(reply.logprobs))

    def _finish_piece(self, piece: Piece, reply: PartialReply, usage: Usage, cache: CacheField) -> Piece:
        """``piece`` with the end of the reply and what it cost."""
        now = time.perf_counter_ns()
        answered = now if self._answered is None else self._answered
        return msgspec.structs.replace(
            piece,
            done=True,
            done_reason=done_reason(reply),
            total_duration=self._load_ns + now - self._started,
            load_duration=self._load_ns,
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=answered - self._started,
            eval_count=usage.completion_tokens,
            eval_duration=now - answered,
            cache=cache,
        )

    def _entries(self, logprobs: Iterable[TokenLogprob]) -> list[Logprob] | UnsetType:
        return [logprob_of(entry) for entry in logprobs] if self._logprobs else UNSET


class OllamaChatReply(OllamaReply):
    """Replies of ``/api/chat``."""

    def piece(self, content: str, thinking: str, calls: Sequence[OllamaToolCall]) -> ChatPiece:
        message = OllamaMessage(content=content, thinking=thinking or UNSET, tool_calls=[*calls] or UNSET)
        return ChatPiece(model=self.head.model, created_at=timestamp(time.time()), done=False, message=message)


class GenerateReply(OllamaReply):
    """Replies of ``/api/generate``."""

    def piece(self, content: str, thinking: str, calls: Sequence[OllamaToolCall]) -> GeneratePiece:
        return GeneratePiece(
            model=self.head.model,
            created_at=timestamp(time.time()),
            done=False,
            response=content,
            thinking=thinking or UNSET,
        )


def done_reason(reply: PartialReply) -> DoneReason:
    """Why a reply ended, in Ollama's words."""
    return "stop" if reply.finish is None or reply.finish == "tool_calls" else reply.finish


def tool_calls(calls: Iterable[ParsedCall]) -> list[OllamaToolCall]:
    """The calls of a reply that has ended."""
    return [
        OllamaToolCall(call.id, OllamaFunction(index, call.name, arguments_object(call.arguments)))
        for index, call in enumerate(calls)
    ]


def logprob_of(entry: TokenLogprob) -> Logprob:
    top = [Logprob(text, max(value, FLOOR), list(raw)) for _, text, raw, value in entry.top]
    own = FLOOR if entry.logprob is None else max(entry.logprob, FLOOR)
    return Logprob(entry.text, own, list(entry.data), top or UNSET)
