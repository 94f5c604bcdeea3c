"""Writes replies in OpenAI's format: stream chunks or one body, of chats."""

from __future__ import annotations

import secrets
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from scheduler.protocol import Delta, TokenLogprob
from server.chat.partial_reply import PartialReply
from server.chat.prompts import Prompt
from server.chat.reply_parser import ContentPiece, Part, ReasoningPiece
from server.errors import ApiError
from server.http.sse import DONE, EVENTS, PING, frame_event
from server.log.chat_rows import row_of
from server.log.logged_message import LoggedMessage
from server.log.response_rows import TurnExtras
from server.schemas import objects
from server.schemas.requests import GenerationRequest
from server.schemas.vendor_fields import FLOOR, NO_TOKEN_OPTIONS, TokenOptions, clamp_logprob
from server.turns.call_deltas import CallDeltas, tool_call

PIECE = 64  # bytes, of which the events of an obfuscated stream are multiples
UsageField = objects.Usage | UnsetType | None
CacheField = objects.CacheReceipt | UnsetType | None  # null: nothing was computed


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The fields that all objects of one answer share."""

    id: str
    created: int
    model: str
    fingerprint: str
    session: str | UnsetType

    @classmethod
    def new(
        cls, prefix: str, model: str, fingerprint: str, session: str | None, created: int | None = None
    ) -> ReplyHead:
        """A head with a new id that contains the session. ``created`` is in Unix seconds; None: now."""
        name = UNSET if session is None else session
        when = int(time.time()) if created is None else created
        unique = uuid.uuid4().hex if session is None else f"{session}-{secrets.token_hex(12)}"
        return cls(f"{prefix}-{unique}", when, model, f"fp_{fingerprint[:16]}", name)


@dataclass(frozen=True, slots=True)
class UsageOptions:
    """Where a stream has usage: ``at_end``, in an additional last chunk, or ``everywhere``; ``elsewhere`` is the
    field's value in the other chunks. ``obfuscated``: chunks are padded to hide the length of their text.
    """

    at_end: bool
    everywhere: bool
    elsewhere: UnsetType | None
    obfuscated: bool = False

    @classmethod
    def of(cls, body: GenerationRequest) -> UsageOptions:
        options = body.stream_options
        everywhere = options is not None and options.continuous_usage_stats
        at_end = everywhere or (options is not None and options.include_usage)
        obfuscated = options is not None and options.include_obfuscation
        return cls(at_end, everywhere, None if at_end else UNSET, obfuscated)


NO_USAGE = UsageOptions(at_end=False, everywhere=False, elsewhere=UNSET)
encoder = msgspec.json.Encoder()


def pad(size: int) -> str:
    """Random letters that pad ``size`` bytes to a multiple of ``PIECE``, which hides the exact length."""
    return secrets.token_urlsafe(PIECE)[: -size % PIECE]


class Reply(ABC):
    """Writes one endpoint's objects. The caller calls the methods in the order of the stream; each returns the objects
    to send then, often one, sometimes none.
    """

    done: bytes = DONE  # what follows the last event
    media_type: str = EVENTS  # of the stream
    ping: bytes | None = PING  # what is sent while a stream is silent; None: nothing
    operation = "chat"  # as OpenTelemetry's GenAI conventions call it

    def __init__(self, head: ReplyHead, options: UsageOptions = NO_USAGE) -> None:
        self.head = head
        self.usage_options = options

    def encode_event(self, chunk: msgspec.Struct) -> bytes:
        """An object as an event of the stream."""
        data = encoder.encode(chunk)
        if (
            self.usage_options.obfuscated
            and isinstance(chunk, objects.ChatChunk | objects.Completion)
            and chunk.choices
        ):
            data = encoder.encode(msgspec.structs.replace(chunk, obfuscation=pad(len(data))))
        return frame_event(data)

    def encode_failure(self, error: ApiError) -> bytes:
        """The last event of a stream that failed; no ``done`` follows."""
        return frame_event(error.encode())

    def observe_delta(self, index: int, delta: Delta, parts: Sequence[Part]) -> None:  # noqa: B027 most need not
        """Called for each delta of a reply that is not streamed, with its parsed parts."""

    def message(self, partial_reply: PartialReply) -> LoggedMessage:
        """The logged message of a reply that has ended."""
        return partial_reply.message()

    def turn_extras(self, partial_reply: PartialReply, usage: objects.Usage, cache: objects.CacheReceipt) -> TurnExtras:
        """What is committed together with the turn of a reply that has ended."""
        return TurnExtras()

    @abstractmethod
    def open_choice(self, index: int, usage: UsageField) -> Sequence[msgspec.Struct]:
        """The objects before a choice's first token."""

    @abstractmethod
    def write_delta(
        self, index: int, delta: Delta, parts: Sequence[Part], usage: UsageField
    ) -> Sequence[msgspec.Struct]:
        """The objects for a delta with its parsed parts."""

    @abstractmethod
    def end_choice(
        self, index: int, partial_reply: PartialReply, usage: UsageField, cache: CacheField
    ) -> Sequence[msgspec.Struct]:
        """The objects at the end of a choice, which is committed by then; the last choice has the receipt."""

    @abstractmethod
    def end_stream(
        self, partial_replies: Sequence[PartialReply], usage: objects.Usage, cache: CacheField
    ) -> Sequence[msgspec.Struct]:
        """The objects after the end of the last choice."""

    @abstractmethod
    def write_body(
        self, partial_replies: Sequence[PartialReply], usage: objects.Usage, cache: objects.CacheReceipt | None
    ) -> msgspec.Struct:
        """The whole answer as one object."""


class ChatReply(Reply):
    """Chat completions."""

    def __init__(
        self,
        head: ReplyHead,
        options: UsageOptions,
        tokens: TokenOptions = NO_TOKEN_OPTIONS,
        prompt: Prompt | None = None,
        echo: str = "",
        tier: str | None = None,
        metadata: Mapping[str, str] | None = None,
        kept: tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]] | None = None,
        custom: Set[str] = frozenset(),
    ) -> None:
        """``prompt``: None for a replay; ``echo`` is put before the reply's content; ``tier``: the service tier that
        the client asked for; ``metadata``: new metadata for the session; ``kept``: for a stored chat, its request's
        parameters and messages; ``custom``: the names of its custom tools.
        """
        super().__init__(head, options)
        self._beside = TurnExtras(metadata=metadata)
        self._kept = kept
        self._tokens = tokens
        self._prompt_ids = UNSET if prompt is None else tokens.select_ids(prompt.ids)
        self._echo = echo
        self._custom = custom
        self._calls: dict[int, CallDeltas] = {}  # by the choice
        self._tier = UNSET if tier is None else "default"  # there is no other one

    def turn_extras(self, partial_reply: PartialReply, usage: objects.Usage, cache: objects.CacheReceipt) -> TurnExtras:
        if self._kept is None:
            return self._beside
        asked, sent = self._kept
        body = msgspec.to_builtins(self.write_body([partial_reply], usage, cache))
        return replace(self._beside, response=row_of({**body, **asked}, sent))

    def open_choice(self, index: int, usage: UsageField) -> Sequence[objects.ChatChunk]:
        chunk = self._chunk([objects.ChatChunkChoice(index, objects.ChatDelta("assistant", self._echo))], usage)
        if self._prompt_ids is UNSET:
            return [chunk]
        return [msgspec.structs.replace(chunk, prompt_token_ids=self._prompt_ids)]

    def write_delta(
        self, index: int, delta: Delta, parts: Sequence[Part], usage: UsageField
    ) -> Sequence[objects.ChatChunk]:
        tokens = self._tokens
        if not parts and not (tokens.logprobs is not None and delta.logprobs) and not (tokens.ids and delta.tokens):
            return ()
        logprobs, ids = self._entries(delta.logprobs), tokens.select_ids(delta.tokens)
        calls = self._calls.setdefault(index, CallDeltas(self._custom))
        choice = objects.ChatChunkChoice(index, chat_delta(parts, calls), logprobs, token_ids=ids)
        return [self._chunk([choice], usage)]

    def end_choice(
        self, index: int, partial_reply: PartialReply, usage: UsageField, cache: CacheField
    ) -> Sequence[objects.ChatChunk]:
        rest = self._calls[index].finish() if index in self._calls else []
        delta = objects.ChatDelta(tool_calls=rest or UNSET)
        choice = objects.ChatChunkChoice(index, delta, finish_reason=partial_reply.finish)
        return [self._chunk([choice], usage, cache)]

    def end_stream(
        self, partial_replies: Sequence[PartialReply], usage: objects.Usage, cache: CacheField
    ) -> Sequence[objects.ChatChunk]:
        return [self._chunk([], usage, cache)] if self.usage_options.at_end else ()

    def write_body(
        self, partial_replies: Sequence[PartialReply], usage: objects.Usage, cache: objects.CacheReceipt | None
    ) -> objects.ChatCompletion:
        head = self.head
        choices = []
        for index, partial_reply in enumerate(partial_replies):
            assert partial_reply.finish is not None
            logprobs = self._entries(partial_reply.logprobs)
            ids = self._tokens.select_ids(partial_reply.tokens) if self._prompt_ids is not UNSET else UNSET
            message = chat_message(partial_reply, self._echo, self._custom)
            choices.append(objects.ChatChoice(index, message, partial_reply.finish, logprobs, ids))
        return objects.ChatCompletion(
            head.id,
            head.created,
            head.model,
            choices,
            usage,
            cache,
            head.fingerprint,
            head.session,
            self._tier,
            self._prompt_ids,
            self._tokens.of_prompt(partial_replies[0].prompt_logprobs),
        )

    def _chunk(
        self, choices: list[objects.ChatChunkChoice], usage: UsageField, cache: CacheField = UNSET
    ) -> objects.ChatChunk:
        head = self.head
        return objects.ChatChunk(
            head.id, head.created, head.model, choices, head.fingerprint, usage, head.session, cache, self._tier
        )

    def _entries(self, logprobs: Iterable[TokenLogprob]) -> objects.ChatLogprobs | None:
        if self._tokens.logprobs is None:
            return None
        return objects.ChatLogprobs([chat_logprob(entry, self._tokens) for entry in logprobs])


def chat_message(partial_reply: PartialReply, echo: str = "", custom: Set[str] = frozenset()) -> objects.ChatMessage:
    """The message of a reply that has ended, after the beginning ``echo``; ``custom``: the names of custom tools."""
    calls = [tool_call(call, call.name in custom) for call in partial_reply.calls]
    return objects.ChatMessage(
        content=echo + partial_reply.content if echo or partial_reply.content or not calls else None,
        reasoning_content=partial_reply.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def chat_delta(parts: Sequence[Part], calls: CallDeltas) -> objects.ChatDelta:
    """The chunk's delta for parsed parts; ``calls`` makes those of this choice. Without parts its content is empty, as
    the logprobs of its tokens need a chunk.
    """
    content = "".join(part.text for part in parts if isinstance(part, ContentPiece))
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPiece))
    return objects.ChatDelta(
        content=content if content or not parts else UNSET,
        reasoning_content=reasoning or UNSET,
        tool_calls=calls.take(parts) or UNSET,
    )


def chat_logprob(entry: TokenLogprob, options: TokenOptions = NO_TOKEN_OPTIONS) -> objects.ChatLogprob:
    """One token's log-probability in the chat format."""
    top = [
        objects.TopLogprob(options.name(id, text), max(value, FLOOR), list(raw)) for id, text, raw, value in entry.top
    ]
    return objects.ChatLogprob(
        options.name(entry.token_id, entry.text), clamp_logprob(entry.logprob), list(entry.data), top
    )
