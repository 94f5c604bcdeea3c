"""Deltas as OpenAI objects: the chunks of a stream or one body, for chats and for completions."""

from __future__ import annotations

import codecs
import secrets
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from scheduler.messages import Delta, TokenLogprob
from server import objects
from server.draft import Draft
from server.errors import ApiError
from server.log import Beside, Message
from server.prompts import Prompt
from server.reading import Arguments, Call, Content, Part, Reasoning
from server.schemas import GenerationRequest
from server.sse import DONE, event

PIECE = 64  # bytes, of which the events of an obfuscated stream are multiples
FLOOR = -9999.0  # what OpenAI writes for impossible tokens; JSON has no infinity
UsageField = objects.Usage | UnsetType | None
CacheField = objects.CacheReceipt | UnsetType | None  # null: nothing was computed


@dataclass(frozen=True)
class Head:
    """What all objects of one answer repeat."""

    id: str
    created: int
    model: str
    fingerprint: str
    session: str | UnsetType

    @classmethod
    def new(cls, prefix: str, model: str, fingerprint: str, session: str | None, created: int | None = None) -> Head:
        """A head with an id of its own, which has the session in it. ``created`` is in Unix seconds; None: now."""
        name = UNSET if session is None else session
        when = int(time.time()) if created is None else created
        unique = uuid.uuid4().hex if session is None else f"{session}-{secrets.token_hex(12)}"
        return cls(f"{prefix}-{unique}", when, model, f"fp_{fingerprint[:16]}", name)


@dataclass(frozen=True)
class UsageWish:
    """Where a stream carries usage: ``at_end`` in a chunk behind the last one, or ``everywhere``; ``elsewhere`` is what
    the field holds in the other chunks. ``obfuscated``: how long a piece of the reply is does not show.
    """

    at_end: bool
    everywhere: bool
    elsewhere: UnsetType | None
    obfuscated: bool = False

    @classmethod
    def of(cls, body: GenerationRequest) -> UsageWish:
        """What a request asked for."""
        options = body.stream_options
        everywhere = options is not None and options.continuous_usage_stats
        at_end = everywhere or (options is not None and options.include_usage)
        obfuscated = options is not None and options.include_obfuscation
        return cls(at_end, everywhere, None if at_end else UNSET, obfuscated)


NO_USAGE = UsageWish(at_end=False, everywhere=False, elsewhere=UNSET)
encoder = msgspec.json.Encoder()


def padding(size: int) -> str:
    """Random letters that make ``size`` bytes as many as those of any other piece of about that size."""
    return secrets.token_urlsafe(PIECE)[: -size % PIECE]


class Reply(ABC):
    """One endpoint's objects. What a stream tells are methods of their own, so that the order is the caller's: each
    gives the objects to send then, often one, sometimes none."""

    done: bytes = DONE  # what follows the last event
    operation = "chat"  # as OpenTelemetry's GenAI conventions call it

    def __init__(self, head: Head, wish: UsageWish = NO_USAGE) -> None:
        self.head = head
        self.wish = wish

    def event(self, told: msgspec.Struct) -> bytes:
        """An object as an event of the stream."""
        data = encoder.encode(told)
        if self.wish.obfuscated and isinstance(told, objects.ChatChunk | objects.Completion) and told.choices:
            data = encoder.encode(msgspec.structs.replace(told, obfuscation=padding(len(data))))
        return event(data)

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that failed; ``done`` does not follow."""
        return event(error.encoded())

    def note(self, index: int, delta: Delta, parts: Sequence[Part]) -> None:  # noqa: B027 most need not
        """Of a reply that is not streamed: a delta, and what its text was read as."""

    def message(self, draft: Draft) -> Message:
        """What the log holds of a reply that has ended."""
        return draft.message()

    def beside(self, draft: Draft, usage: objects.Usage, cache: objects.CacheReceipt) -> Beside:
        """What is committed with the turn of a reply that has ended."""
        return Beside()

    @abstractmethod
    def opening(self, index: int, usage: UsageField) -> Sequence[msgspec.Struct]:
        """Before a choice's first token."""

    @abstractmethod
    def piece(self, index: int, delta: Delta, parts: Sequence[Part], usage: UsageField) -> Sequence[msgspec.Struct]:
        """For a delta, and what its text was read as."""

    @abstractmethod
    def ending(self, index: int, draft: Draft, usage: UsageField, cache: CacheField) -> Sequence[msgspec.Struct]:
        """At the end of a choice, which is durable by then; with the last one goes the receipt."""

    @abstractmethod
    def closing(self, drafts: Sequence[Draft], usage: objects.Usage, cache: CacheField) -> Sequence[msgspec.Struct]:
        """Behind the end of the last choice."""

    @abstractmethod
    def body(self, drafts: Sequence[Draft], usage: objects.Usage, cache: objects.CacheReceipt | None) -> msgspec.Struct:
        """Everything at once."""


class ChatReply(Reply):
    """Chat completions."""

    def __init__(
        self,
        head: Head,
        wish: UsageWish,
        logprobs: bool,
        tier: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """``tier``: the service tier that the client asked for, if it did; ``metadata``: other ones for the session."""
        super().__init__(head, wish)
        self._beside = Beside(metadata=metadata)
        self._logprobs = logprobs
        self._tier = UNSET if tier is None else "default"  # there is no other one

    def beside(self, draft: Draft, usage: objects.Usage, cache: objects.CacheReceipt) -> Beside:
        return self._beside

    def opening(self, index: int, usage: UsageField) -> Sequence[objects.ChatChunk]:
        return [self._chunk([objects.ChatChunkChoice(index, objects.ChatDelta("assistant", ""))], usage)]

    def piece(self, index: int, delta: Delta, parts: Sequence[Part], usage: UsageField) -> Sequence[objects.ChatChunk]:
        if not parts and not (self._logprobs and delta.logprobs):
            return ()
        choice = objects.ChatChunkChoice(index, chat_delta(parts), self._entries(delta.logprobs))
        return [self._chunk([choice], usage)]

    def ending(self, index: int, draft: Draft, usage: UsageField, cache: CacheField) -> Sequence[objects.ChatChunk]:
        choice = objects.ChatChunkChoice(index, objects.ChatDelta(), finish_reason=draft.finish)
        return [self._chunk([choice], usage, cache)]

    def closing(self, drafts: Sequence[Draft], usage: objects.Usage, cache: CacheField) -> Sequence[objects.ChatChunk]:
        return [self._chunk([], usage, cache)] if self.wish.at_end else ()

    def body(
        self, drafts: Sequence[Draft], usage: objects.Usage, cache: objects.CacheReceipt | None
    ) -> objects.ChatCompletion:
        head = self.head
        choices = []
        for index, draft in enumerate(drafts):
            assert draft.finish is not None
            logprobs = self._entries(draft.logprobs)
            choices.append(objects.ChatChoice(index, chat_message(draft), draft.finish, logprobs))
        return objects.ChatCompletion(
            head.id, head.created, head.model, choices, usage, cache, head.fingerprint, head.session, self._tier
        )

    def _chunk(
        self, choices: list[objects.ChatChunkChoice], usage: UsageField, cache: CacheField = UNSET
    ) -> objects.ChatChunk:
        head = self.head
        return objects.ChatChunk(
            head.id, head.created, head.model, choices, head.fingerprint, usage, head.session, cache, self._tier
        )

    def _entries(self, logprobs: Iterable[TokenLogprob]) -> objects.ChatLogprobs | None:
        if not self._logprobs:
            return None
        return objects.ChatLogprobs([chat_logprob(entry) for entry in logprobs])


def chat_message(draft: Draft) -> objects.ChatMessage:
    """A reply that has ended."""
    calls = [objects.ToolCall(call.id, objects.CalledFunction(call.name, call.arguments)) for call in draft.calls]
    return objects.ChatMessage(
        content=draft.content if draft.content or not calls else None,
        reasoning_content=draft.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def chat_delta(parts: Sequence[Part]) -> objects.ChatDelta:
    """What one delta was read as. Without any part it is content that is empty: its tokens' logprobs need a place."""
    content = "".join(part.text for part in parts if isinstance(part, Content))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    begun = {part.index: part for part in parts if isinstance(part, Call)}
    arguments: dict[int, str] = dict.fromkeys(begun, "")
    for part in parts:
        if isinstance(part, Arguments):
            arguments[part.index] = arguments.get(part.index, "") + part.text
    calls = [call_delta(index, begun.get(index), text) for index, text in arguments.items()]
    return objects.ChatDelta(
        content=content if content or not parts else UNSET,
        reasoning_content=reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def call_delta(index: int, call: Call | None, arguments: str) -> objects.ToolCallDelta:
    """More of a call; ``call`` if it begins."""
    if call is None:
        return objects.ToolCallDelta(index, objects.FunctionDelta(arguments=arguments))
    return objects.ToolCallDelta(index, objects.FunctionDelta(call.name, arguments), call.id, "function")


def chat_logprob(entry: TokenLogprob) -> objects.ChatLogprob:
    """One token in the chat's form."""
    top = [objects.TopLogprob(text, max(value, FLOOR), list(raw)) for _, text, raw, value in entry.top]
    return objects.ChatLogprob(entry.text, finite(entry.logprob), list(entry.data), top)


def finite(logprob: float | None) -> float:
    """A number for JSON."""
    return FLOOR if logprob is None else max(logprob, FLOOR)


class CompletionReply(Reply):
    """Text completions. ``prompts`` has one entry per choice; with ``echo`` each text starts with its prompt. ``best``
    of every so many choices are told, those with the highest log-probability per token: (2, 5) tells two of five."""

    operation = "text_completion"

    def __init__(
        self,
        head: Head,
        wish: UsageWish,
        prompts: Sequence[Prompt],
        echo: bool,
        logprobs: bool,
        best: tuple[int, int] = (1, 1),
    ) -> None:
        super().__init__(head, wish)
        self._best = best
        self._echoes = [prompt.echo if echo else "" for prompt in prompts]
        self._columns = [LogprobColumns(prompt.echo, prompt.echo_from) if logprobs else None for prompt in prompts]

    def opening(self, index: int, usage: UsageField) -> Sequence[objects.Completion]:
        if not self._echoes[index]:
            return ()
        return [self._chunk([objects.CompletionChoice(index, self._echoes[index])], usage)]

    def piece(self, index: int, delta: Delta, parts: Sequence[Part], usage: UsageField) -> Sequence[objects.Completion]:
        logprobs = self._entries(index, delta.prompt_logprobs, delta.logprobs)
        if not delta.text and (logprobs is None or not logprobs.tokens):
            return ()
        return [self._chunk([objects.CompletionChoice(index, delta.text, logprobs)], usage)]

    def ending(self, index: int, draft: Draft, usage: UsageField, cache: CacheField) -> Sequence[objects.Completion]:
        return [self._chunk([objects.CompletionChoice(index, "", finish_reason=draft.finish)], usage, cache)]

    def closing(self, drafts: Sequence[Draft], usage: objects.Usage, cache: CacheField) -> Sequence[objects.Completion]:
        return [self._chunk([], usage, cache)] if self.wish.at_end else ()

    def body(
        self, drafts: Sequence[Draft], usage: objects.Usage, cache: objects.CacheReceipt | None
    ) -> objects.Completion:
        choices: list[objects.CompletionChoice] = []
        told, of = self._best
        for first in range(0, len(drafts), of):
            group = sorted(range(first, first + of), key=lambda index: -likelihood(drafts[index]))
            for index in group[:told] if told < of else range(first, first + of):
                draft = drafts[index]
                logprobs = self._entries(index, draft.prompt_logprobs, draft.logprobs)
                text = self._echoes[index] + draft.content
                choices.append(objects.CompletionChoice(len(choices), text, logprobs, draft.finish))
        return self._chunk(choices, usage, cache)

    def _chunk(
        self, choices: list[objects.CompletionChoice], usage: UsageField, cache: CacheField = UNSET
    ) -> objects.Completion:
        head = self.head
        return objects.Completion(
            head.id, head.created, head.model, choices, head.fingerprint, usage, head.session, cache
        )

    def _entries(
        self, index: int, prompt: Sequence[TokenLogprob], generated: Sequence[TokenLogprob]
    ) -> objects.CompletionLogprobs | None:
        columns = self._columns[index]
        return None if columns is None else columns.take(prompt, generated)


def likelihood(draft: Draft) -> float:
    """The mean log-probability of a choice's tokens."""
    values = [finite(entry.logprob) for entry in draft.logprobs]
    return sum(values) / len(values) if values else FLOOR


class LogprobColumns:
    """The parallel lists of one choice, and where in its text the next token starts.

    A character may need several tokens: its offset is that of the token that begins it. Prompt tokens that the
    echoed text does not show (BOS) take no room; the first ``skip`` prompt tokens are a session's past.
    """

    def __init__(self, echo: str, skip: int) -> None:
        self._echo = echo
        self._skip = skip
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, prompt: Sequence[TokenLogprob], generated: Sequence[TokenLogprob]) -> objects.CompletionLogprobs:
        """The lists for the next entries."""
        lists = objects.CompletionLogprobs([], [], [], [])
        shown = prompt[self._skip :]
        self._skip -= len(prompt) - len(shown)
        for entry in shown:
            self._append(lists, entry, within=self._echo)
        for entry in generated:
            self._append(lists, entry)
        return lists

    def _append(self, lists: objects.CompletionLogprobs, entry: TokenLogprob, within: str | None = None) -> None:
        lists.tokens.append(entry.text)
        lists.token_logprobs.append(None if entry.logprob is None else max(entry.logprob, FLOOR))
        lists.top_logprobs.append(None if entry.logprob is None else alternatives(entry))
        lists.text_offset.append(self._offset)
        text = self._decoder.decode(entry.data)
        if within is None or within.startswith(text, self._offset):
            self._offset += len(text)


def alternatives(entry: TokenLogprob) -> dict[str, float]:
    """Text -> log-probability, the token itself included. Of two tokens with one text the likelier counts."""
    found: dict[str, float] = {}
    for _, text, _, value in entry.top:
        found.setdefault(text, max(value, FLOOR))
    found.setdefault(entry.text, finite(entry.logprob))
    return found
