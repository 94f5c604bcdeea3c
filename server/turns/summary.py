"""Writes a summary of a conversation with the served model, on the conversation's own cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import ClassVar

import msgspec

from scheduler.model_facts import ModelFacts
from scheduler.protocol import Delta
from server.chat.partial_reply import PartialReply
from server.chat.prompts import Prompt
from server.chat.reply_parser import Part
from server.chat.thinking_budget import measure_budget
from server.errors import ApiError, bad_request
from server.schemas import objects
from server.schemas.requests import TurnRequest
from server.turns.context import ServerContext
from server.turns.pending_turn import LineTurn, PendingTurn
from server.turns.replies import CacheField, Reply, ReplyHead, UsageField
from server.turns.reply_rules import ReplyRules
from server.turns.turn_runner import TurnRunner

LONGEST = 4096  # tokens of a summary
SHARE = 8  # a summary takes at most this part of the context: one in so many
SHORTEST = 256  # tokens that there is room for at least, or as many as a summary may have


def longest_summary(facts: ModelFacts) -> int:
    return max(1, min(LONGEST, facts.max_context // SHARE))


def shortest_summary(facts: ModelFacts) -> int:
    """How many tokens of a summary there must be room for."""
    return min(SHORTEST, longest_summary(facts))


class SummaryRequest(TurnRequest):
    """The turn that writes a summary."""

    PROMPT: ClassVar[str] = "input"
    limit: int

    @property
    def token_limit(self) -> int | None:
        return self.limit

    @property
    def yields(self) -> bool:
        return True

    @property
    def token_logprobs(self) -> int | None:
        return None


class SummaryReply(Reply):
    """Keeps the reply instead of writing it: ``text``, and the ``usage`` of the turn."""

    done = b""

    def __init__(self, head: ReplyHead) -> None:
        super().__init__(head)
        self.text = ""
        self.usage = objects.Usage(0, 0, 0, objects.CachedTokens(0), objects.CompletionTokens(0))

    def open_choice(self, index: int, usage: UsageField) -> Sequence[msgspec.Struct]:
        return ()

    def write_delta(
        self, index: int, delta: Delta, parts: Sequence[Part], usage: UsageField
    ) -> Sequence[msgspec.Struct]:
        return ()

    def end_choice(
        self, index: int, partial_reply: PartialReply, usage: UsageField, cache: CacheField
    ) -> Sequence[msgspec.Struct]:
        return ()

    def end_stream(
        self, partial_replies: Sequence[PartialReply], usage: objects.Usage, cache: CacheField
    ) -> Sequence[msgspec.Struct]:
        self.text = partial_replies[0].message().content.strip()
        self.usage = usage
        return ()

    def write_body(
        self, partial_replies: Sequence[PartialReply], usage: objects.Usage, cache: objects.CacheReceipt | None
    ) -> msgspec.Struct:
        raise AssertionError("a summary is read as a stream")


async def write_summary(turn: PendingTurn, prompt: Prompt) -> SummaryReply:
    """The summary that ``prompt`` asks for. Nothing is stored; the KV behind the conversation's own is the first to be
    evicted. Raises what ``TurnRunner`` raises, and a 400 if the prompt leaves no room for a summary or the model writes
    none.
    """
    with ExitStack() as claim:
        aside = summary_turn(turn, claim)
        reply = SummaryReply(aside.reply_head("summary"))
        runner = TurnRunner(aside, [prompt], await summary_rules(turn.context, prompt), reply)
        choices = runner.submit()
        claim.callback(choices.close)
        async for _ in runner.events(choices):
            pass
    if not reply.text:
        raise no_summary()
    return reply


def summary_turn(turn: PendingTurn, claim: ExitStack, *, stream: bool = False) -> PendingTurn:
    """The turn beside ``turn`` that writes a summary; no session takes it."""
    limit = longest_summary(turn.context.facts)
    asked = {"limit": limit, "seed": 0, "cache_salt": turn.body.cache_salt, "stream": stream}
    body = SummaryRequest.model_validate(asked)
    line = LineTurn(objects.LineReceipt("side", "", 0), side=True)
    return replace(turn, body=body, session=None, idempotency=None, claim=claim, line=line)


async def summary_rules(context: ServerContext, prompt: Prompt) -> ReplyRules:
    """The rules of a summary: it calls no tools, and half of its tokens at most are reasoning."""
    thinking = None
    with suppress(ValueError):  # the marks of reasoning are not known as texts: then there is no limit
        limit, message = longest_summary(context.facts) // 2, context.thinking.message
        thinking = await context.tokens.run(measure_budget, context.tokens, prompt.tail, limit, message, calls=False)
    return ReplyRules(dialect=context.tokens.dialect, tail=prompt.tail, thinking=thinking)


def no_summary() -> ApiError:
    """400: the model answered with nothing."""
    message = "This conversation cannot be compacted: the model wrote no summary of it."
    return bad_request(message, code="compaction_failed")
