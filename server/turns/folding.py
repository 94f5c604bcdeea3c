"""Folds a conversation: the served model summarises its older part, in several parts where the context is too short for
all of it at once, the oldest part first.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from scheduler.model_facts import ModelFacts
from server.chat.compaction import ask_for_summary, can_be_folded, cuts_of, fold_messages, front_of
from server.chat.prompts import Prompt, context_exceeded, count_fed
from server.errors import ApiError, bad_request
from server.log.identity import Session
from server.log.logged_message import LoggedMessage
from server.log.session_log import SessionLog
from server.schemas import objects
from server.turns.pending_turn import PendingTurn
from server.turns.summary import shortest_summary, write_summary

MOST_PARTS = 8  # of one conversation
TOO_LONG = "context_length_exceeded"
Measure = Callable[[list[LoggedMessage]], Awaitable[Prompt]]
Ask = Callable[[list[LoggedMessage]], Awaitable[tuple[PendingTurn, Prompt]]]


@dataclass
class Folding:
    """``measure`` makes the prompt of messages that end with the question for a summary, and raises a 400 where they
    leave no room for it; ``ask`` makes the turn on the cache of the conversation too. ``instructions`` take the place
    of our own question. ``param``: the field that has the conversation, for errors.
    """

    measure: Measure
    ask: Ask
    param: str
    instructions: str | None = None
    spent: list[objects.Usage] = field(default_factory=list)

    async def summarise(self, messages: Sequence[LoggedMessage]) -> str:
        """A summary of all messages but those in front. Raises a 400 if no part of them can be summarised."""
        reply = await write_summary(*await self.question(messages))
        self.spent.append(reply.usage)
        return reply.text

    async def question(self, messages: Sequence[LoggedMessage]) -> tuple[PendingTurn, Prompt]:
        """The turn that asks for a summary of all messages; of what does not fit, the oldest parts are summarised
        first. Raises a 400 like ``summarise``.
        """
        front = front_of(messages)
        now = [*messages[:front], *(message for message in messages[front:] if not message.dropped)]
        for _ in range(MOST_PARTS):
            try:
                return await self.ask([*now, ask_for_summary(self.instructions)])
            except ApiError as error:
                if not is_too_long(error):
                    raise
            end = await self._longest_part(now)
            reply = await write_summary(*await self.ask([*now[:end], ask_for_summary(self.instructions)]))
            self.spent.append(reply.usage)
            now = [*now[: front_of(now)], *fold_messages(now, end, reply.text)]
        raise cannot_fold(self.param)

    def receipt(self, reason: objects.CompactionReason, messages: int, parts: int = 0) -> objects.CompactionReceipt:
        """What it cost so far, for so many messages. ``parts``: how many more summaries there will be."""
        usage = self.usage
        cached, written = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens
        return objects.CompactionReceipt(
            reason, messages, len(self.spent) + parts, usage.prompt_tokens, cached, written
        )

    @property
    def usage(self) -> objects.Usage:
        """All its tokens so far."""
        prompt = sum(usage.prompt_tokens for usage in self.spent)
        completion = sum(usage.completion_tokens for usage in self.spent)
        cached = sum(usage.prompt_tokens_details.cached_tokens for usage in self.spent)
        thought = sum(usage.completion_tokens_details.reasoning_tokens for usage in self.spent)
        details = objects.CachedTokens(cached), objects.CompletionTokens(thought)
        return objects.Usage(prompt, completion, prompt + completion, *details)

    async def _longest_part(self, messages: Sequence[LoggedMessage]) -> int:
        """Where the longest part ends that can be summarised and shortens the conversation. Raises a 400."""
        ends = [end for end in cuts_of(messages, len(messages)) if can_be_folded(messages, end)]
        low, high = 0, len(ends)  # all of ends[:low] fit, none of ends[high:]
        while low < high:
            middle = (low + high) // 2
            if await self._fits(messages[: ends[middle]]):
                low = middle + 1
            else:
                high = middle
        if not low:
            raise cannot_fold(self.param)
        return ends[low - 1]

    async def _fits(self, messages: Sequence[LoggedMessage]) -> bool:
        """Whether these messages leave room for a summary."""
        try:
            await self.measure([*messages, ask_for_summary(self.instructions)])
        except ApiError as error:
            if not is_too_long(error):
                raise
            return False
        return True


async def keep_aside(log: SessionLog, session: Session) -> str:
    """Fork a session that the caller holds, so that it can be gone back to. Returns the new session's name."""
    name = f"sess_{uuid.uuid4().hex}"
    async with log.holding(session.tenant, name):
        await log.fork(session.tenant, session.name, name)
    return name


def with_room(prompt: Prompt, facts: ModelFacts, param: str) -> Prompt:
    """``prompt``, if it leaves room for a summary. Raises a 400."""
    if count_fed(prompt, facts) + shortest_summary(facts) > facts.max_context:
        raise context_exceeded(f"This model's context is {facts.max_context} tokens: a summary does not fit.", param)
    return prompt


def is_too_long(error: ApiError) -> bool:
    """Whether an error says that a prompt does not fit."""
    return error.body.error.code == TOO_LONG


def cannot_fold(param: str) -> ApiError:
    """400: no summary can make it fit."""
    message = f"{param} is too long for this model's context, also as a summary: too much of it is in too few messages."
    return bad_request(message, param, TOO_LONG)
