"""Deltas as OpenAI objects: the chunks of a stream or one body, for chats and for completions."""

from __future__ import annotations

import codecs
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType

from scheduler.messages import Delta, TokenLogprob
from server import objects
from server.draft import Draft
from server.errors import ApiError
from server.prompts import Prompt
from server.reading import Content, Part
from server.schemas import GenerationRequest
from server.sse import DONE, event

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
        """A head with an id of its own. ``created`` is in Unix seconds; None: now."""
        name = UNSET if session is None else session
        when = int(time.time()) if created is None else created
        return cls(f"{prefix}-{uuid.uuid4().hex}", when, model, f"fp_{fingerprint[:16]}", name)


@dataclass(frozen=True)
class UsageWish:
    """Where a stream carries usage: ``at_end`` in a chunk behind the last one, or ``everywhere``; ``elsewhere`` is what
    the field holds in the other chunks.
    """

    at_end: bool
    everywhere: bool
    elsewhere: UnsetType | None

    @classmethod
    def of(cls, body: GenerationRequest) -> UsageWish:
        """What a request asked for."""
        options = body.stream_options
        everywhere = options is not None and options.continuous_usage_stats
        at_end = everywhere or (options is not None and options.include_usage)
        return cls(at_end, everywhere, None if at_end else UNSET)


NO_USAGE = UsageWish(at_end=False, everywhere=False, elsewhere=UNSET)
encoder = msgspec.json.Encoder()


class Reply(ABC):
    """One endpoint's objects. What a stream tells are methods of their own, so that the order is the caller's: each
    gives the objects to send then, often one, sometimes none."""

    done: bytes = DONE  # what follows the last event

    def __init__(self, head: Head, wish: UsageWish = NO_USAGE) -> None:
        self.head = head
        self.wish = wish

    def event(self, told: msgspec.Struct) -> bytes:
        """An object as an event of the stream."""
        return event(encoder.encode(told))

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that failed; ``done`` does not follow."""
        return event(error.encoded())

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

    def __init__(self, head: Head, wish: UsageWish, logprobs: bool) -> None:
        super().__init__(head, wish)
        self._logprobs = logprobs

    def opening(self, index: int, usage: UsageField) -> Sequence[objects.ChatChunk]:
        return [self._chunk([objects.ChatChunkChoice(index, objects.ChatDelta("assistant", ""))], usage)]

    def piece(self, index: int, delta: Delta, parts: Sequence[Part], usage: UsageField) -> Sequence[objects.ChatChunk]:
        text = "".join(part.text for part in parts if isinstance(part, Content))
        if not text and not (self._logprobs and delta.logprobs):
            return ()
        logprobs = self._entries(delta.logprobs)
        return [self._chunk([objects.ChatChunkChoice(index, objects.ChatDelta(content=text), logprobs)], usage)]

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
            message = objects.ChatMessage(draft.content)
            choices.append(objects.ChatChoice(index, message, draft.finish, self._entries(draft.logprobs)))
        return objects.ChatCompletion(
            head.id, head.created, head.model, choices, usage, cache, head.fingerprint, head.session
        )

    def _chunk(
        self, choices: list[objects.ChatChunkChoice], usage: UsageField, cache: CacheField = UNSET
    ) -> objects.ChatChunk:
        head = self.head
        return objects.ChatChunk(
            head.id, head.created, head.model, choices, head.fingerprint, usage, head.session, cache
        )

    def _entries(self, logprobs: Iterable[TokenLogprob]) -> objects.ChatLogprobs | None:
        if not self._logprobs:
            return None
        return objects.ChatLogprobs([chat_logprob(entry) for entry in logprobs])


def chat_logprob(entry: TokenLogprob) -> objects.ChatLogprob:
    """One token in the chat's form."""
    top = [objects.TopLogprob(text, max(value, FLOOR), list(raw)) for _, text, raw, value in entry.top]
    return objects.ChatLogprob(entry.text, finite(entry.logprob), list(entry.data), top)


def finite(logprob: float | None) -> float:
    """A number for JSON."""
    return FLOOR if logprob is None else max(logprob, FLOOR)


class CompletionReply(Reply):
    """Text completions. ``prompts`` has one entry per choice; with ``echo`` each text starts with its prompt."""

    def __init__(self, head: Head, wish: UsageWish, prompts: Sequence[Prompt], echo: bool, logprobs: bool) -> None:
        super().__init__(head, wish)
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
        choices = []
        for index, draft in enumerate(drafts):
            logprobs = self._entries(index, draft.prompt_logprobs, draft.logprobs)
            text = self._echoes[index] + draft.content
            choices.append(objects.CompletionChoice(index, text, logprobs, draft.finish))
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
