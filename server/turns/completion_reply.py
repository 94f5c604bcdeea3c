"""Writes replies of text completions: stream chunks or one body, and the lists of log-probabilities."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from msgspec import UNSET

from scheduler.protocol import Delta, TokenLogprob
from server.chat.partial_reply import PartialReply
from server.chat.prompts import Prompt
from server.chat.reply_parser import Part
from server.schemas import objects
from server.schemas.vendor_fields import FLOOR, NO_TOKEN_OPTIONS, TokenOptions, clamp_logprob
from server.turns.replies import CacheField, Reply, ReplyHead, UsageField, UsageOptions


class CompletionReply(Reply):
    """Text completions. ``prompts`` has one entry per choice; with ``echo`` each text begins with its prompt. ``best``,
    as in (2, 5): of each 5 choices, the 2 with the highest mean log-probability are returned.
    """

    operation = "text_completion"

    def __init__(
        self,
        head: ReplyHead,
        options: UsageOptions,
        prompts: Sequence[Prompt],
        echo: bool,
        tokens: TokenOptions = NO_TOKEN_OPTIONS,
        best: tuple[int, int] = (1, 1),
    ) -> None:
        super().__init__(head, options)
        self._tokens = tokens
        self._prompt_ids = [tokens.select_ids(prompt.ids) for prompt in prompts]
        self._best = best
        self._echo = echo
        self._echoes = [prompt.echo if echo else "" for prompt in prompts]
        self._columns = [
            LogprobColumns(prompt.echo, prompt.echo_from, tokens) if tokens.logprobs is not None else None
            for prompt in prompts
        ]

    def open_choice(self, index: int, usage: UsageField) -> Sequence[objects.Completion]:
        ids = self._prompt_ids[index]
        if not self._echoes[index] and ids is UNSET:
            return ()
        return [self._chunk([objects.CompletionChoice(index, self._echoes[index], prompt_token_ids=ids)], usage)]

    def write_delta(
        self, index: int, delta: Delta, parts: Sequence[Part], usage: UsageField
    ) -> Sequence[objects.Completion]:
        logprobs = self._entries(index, delta.prompt_logprobs, delta.logprobs)
        ids = self._tokens.select_ids(delta.tokens)
        if not delta.text and (logprobs is None or not logprobs.tokens) and not ids:
            return ()
        return [self._chunk([objects.CompletionChoice(index, delta.text, logprobs, token_ids=ids)], usage)]

    def end_choice(
        self, index: int, partial_reply: PartialReply, usage: UsageField, cache: CacheField
    ) -> Sequence[objects.Completion]:
        return [self._chunk([objects.CompletionChoice(index, "", finish_reason=partial_reply.finish)], usage, cache)]

    def end_stream(
        self, partial_replies: Sequence[PartialReply], usage: objects.Usage, cache: CacheField
    ) -> Sequence[objects.Completion]:
        return [self._chunk([], usage, cache)] if self.usage_options.at_end else ()

    def write_body(
        self, partial_replies: Sequence[PartialReply], usage: objects.Usage, cache: objects.CacheReceipt | None
    ) -> objects.Completion:
        choices: list[objects.CompletionChoice] = []
        told, of = self._best
        for first in range(0, len(partial_replies), of):
            group = sorted(range(first, first + of), key=lambda index: -likelihood(partial_replies[index]))
            for index in group[:told] if told < of else range(first, first + of):
                partial_reply = partial_replies[index]
                logprobs = self._entries(index, partial_reply.prompt_logprobs, partial_reply.logprobs)
                ids = self._prompt_ids[index]
                choices.append(
                    objects.CompletionChoice(
                        len(choices),
                        self._echoes[index] + partial_reply.content,
                        logprobs,
                        partial_reply.finish,
                        UNSET if ids is UNSET else partial_reply.tokens,
                        ids,
                        self._tokens.of_prompt(partial_reply.prompt_logprobs),
                    )
                )
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
        return None if columns is None else columns.take(prompt if self._echo else (), generated)


def likelihood(partial_reply: PartialReply) -> float:
    """The mean log-probability of a choice's tokens."""
    values = [clamp_logprob(entry.logprob) for entry in partial_reply.logprobs]
    return sum(values) / len(values) if values else FLOOR


class LogprobColumns:
    """The log-probability lists of one choice, and the offset in its text of the next token. A character may need
    several tokens: its offset is that of the first of them. Prompt tokens that the echoed text does not show (BOS) have
    no length; the first ``skip`` prompt tokens belong to the session's earlier turns.
    """

    def __init__(self, echo: str, skip: int, options: TokenOptions = NO_TOKEN_OPTIONS) -> None:
        self._echo = echo
        self._skip = skip
        self._options = options
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
        lists.tokens.append(self._options.name(entry.token_id, entry.text))
        lists.token_logprobs.append(None if entry.logprob is None else max(entry.logprob, FLOOR))
        lists.top_logprobs.append(None if entry.logprob is None else alternatives(entry, self._options))
        lists.text_offset.append(self._offset)
        text = self._decoder.decode(entry.data)
        if within is None or within.startswith(text, self._offset):
            self._offset += len(text)


def alternatives(entry: TokenLogprob, options: TokenOptions) -> dict[str, float]:
    """Text -> log-probability, the token itself included. If two tokens have the same text, the likelier one is
    kept.
    """
    found: dict[str, float] = {}
    for id, text, _, value in entry.top[: options.logprobs]:
        found.setdefault(options.name(id, text), max(value, FLOOR))
    found.setdefault(options.name(entry.token_id, entry.text), clamp_logprob(entry.logprob))
    return found
