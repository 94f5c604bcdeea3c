"""Deltas as OpenAI objects: the chunks of a stream or one body, for chats and for completions."""

from __future__ import annotations

import codecs
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from scheduler.messages import Delta, FinishReason, TokenLogprob
from server import objects
from server.prompts import Prompt
from server.schemas import GenerationRequest

FLOOR = -9999.0  # what OpenAI writes for impossible tokens; JSON has no infinity
FINISH: dict[FinishReason, objects.Finish] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
UsageField = objects.Usage | UnsetType | None
CacheField = objects.CacheReceipt | UnsetType | None  # null: nothing was computed


@dataclass
class Draft:
    """What one choice has told so far."""

    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: objects.Finish | None = None

    def add(self, delta: Delta) -> None:
        """Append one delta."""
        self.tokens.extend(delta.tokens)
        if delta.text:
            self.texts.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.prompt_logprobs.extend(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            self.finish = FINISH[delta.finish_reason]

    @property
    def text(self) -> str:
        """The reply so far."""
        return "".join(self.texts)


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


class Reply(ABC):
    """One endpoint's objects. Chunks are methods of their own, so that the order is the caller's."""

    def __init__(self, head: Head) -> None:
        self.head = head

    @abstractmethod
    def opening(self, index: int, usage: UsageField) -> msgspec.Struct | None:
        """The chunk that comes before a choice's first token."""

    @abstractmethod
    def piece(self, index: int, delta: Delta, usage: UsageField) -> msgspec.Struct | None:
        """The chunk for a delta; None when it has nothing to show yet."""

    @abstractmethod
    def ending(self, index: int, finish: objects.Finish, usage: UsageField, cache: CacheField) -> msgspec.Struct:
        """The chunk that ends a choice; the last one carries the receipt."""

    @abstractmethod
    def usage(self, usage: objects.Usage, cache: CacheField) -> msgspec.Struct:
        """The chunk behind the last choice's end."""

    @abstractmethod
    def body(self, drafts: Sequence[Draft], usage: objects.Usage, cache: objects.CacheReceipt | None) -> msgspec.Struct:
        """Everything at once."""


class ChatReply(Reply):
    """Chat completions."""

    def __init__(self, head: Head, logprobs: bool) -> None:
        super().__init__(head)
        self._logprobs = logprobs

    def opening(self, index: int, usage: UsageField) -> objects.ChatChunk:
        return self._chunk([objects.ChatChunkChoice(index, objects.ChatDelta("assistant", ""))], usage)

    def piece(self, index: int, delta: Delta, usage: UsageField) -> objects.ChatChunk | None:
        if not delta.text and not (self._logprobs and delta.logprobs):
            return None
        logprobs = self._entries(delta.logprobs)
        return self._chunk([objects.ChatChunkChoice(index, objects.ChatDelta(content=delta.text), logprobs)], usage)

    def ending(self, index: int, finish: objects.Finish, usage: UsageField, cache: CacheField) -> objects.ChatChunk:
        return self._chunk([objects.ChatChunkChoice(index, objects.ChatDelta(), finish_reason=finish)], usage, cache)

    def usage(self, usage: objects.Usage, cache: CacheField) -> objects.ChatChunk:
        return self._chunk([], usage, cache)

    def body(
        self, drafts: Sequence[Draft], usage: objects.Usage, cache: objects.CacheReceipt | None
    ) -> objects.ChatCompletion:
        head = self.head
        choices = []
        for index, draft in enumerate(drafts):
            assert draft.finish is not None
            message = objects.ChatMessage(draft.text)
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

    def __init__(self, head: Head, prompts: Sequence[Prompt], echo: bool, logprobs: bool) -> None:
        super().__init__(head)
        self._echoes = [prompt.echo if echo else "" for prompt in prompts]
        self._columns = [LogprobColumns(prompt.echo, prompt.echo_from) if logprobs else None for prompt in prompts]

    def opening(self, index: int, usage: UsageField) -> objects.Completion | None:
        if not self._echoes[index]:
            return None
        return self._chunk([objects.CompletionChoice(index, self._echoes[index])], usage)

    def piece(self, index: int, delta: Delta, usage: UsageField) -> objects.Completion | None:
        logprobs = self._entries(index, delta.prompt_logprobs, delta.logprobs)
        if not delta.text and (logprobs is None or not logprobs.tokens):
            return None
        return self._chunk([objects.CompletionChoice(index, delta.text, logprobs)], usage)

    def ending(self, index: int, finish: objects.Finish, usage: UsageField, cache: CacheField) -> objects.Completion:
        return self._chunk([objects.CompletionChoice(index, "", finish_reason=finish)], usage, cache)

    def usage(self, usage: objects.Usage, cache: CacheField) -> objects.Completion:
        return self._chunk([], usage, cache)

    def body(
        self, drafts: Sequence[Draft], usage: objects.Usage, cache: objects.CacheReceipt | None
    ) -> objects.Completion:
        choices = []
        for index, draft in enumerate(drafts):
            logprobs = self._entries(index, draft.prompt_logprobs, draft.logprobs)
            text = self._echoes[index] + draft.text
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
