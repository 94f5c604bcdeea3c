"""Compacts the conversation of a response: older messages are summarised, and the response follows the summary."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from msgspec import structs

from scheduler.model_facts import ModelFacts
from server.api.responses.client_tools import ToolNames
from server.api.responses.prompt import (
    fold_front,
    prompt_limit,
    rendering_change_of,
    response_prompt,
    restore_dropped,
    visible_messages,
    with_instructions,
)
from server.api.responses.reading import ReadInput, make_prompt
from server.api.responses.reply import ResponseReply
from server.api.responses.response_branch import CHAIN, ResponseBranch
from server.api.responses.schemas import InputRequest, ResponseRequest
from server.chat.chat_tokenizer import ChatTokenizer
from server.chat.compaction import can_be_folded, fold_messages, front_of, newest_from
from server.chat.prompts import EMPTY_RECORD, Prompt, check_room, continuation, count_fed
from server.chat.rendering import order_tools, rendering_in_force
from server.config.prompt_rules import TOOL_ORDER
from server.errors import ApiError
from server.lines.recognition import Conversation, recognise
from server.log.logged_message import LoggedMessage
from server.log.timeline import NewTurn, SessionRecord, at_turn, common_prefix
from server.schemas.items import SEALED_AT, CompactionItem, entry, kind_of, new_id
from server.schemas.objects import CompactionReason, CompactionReceipt
from server.schemas.sealed_compaction import seal_messages
from server.turns.choices import Choices
from server.turns.context import ServerContext
from server.turns.folding import Folding, is_too_long, keep_aside, with_room
from server.turns.pending_turn import PendingTurn
from server.turns.reply_rules import ReplyRules
from server.turns.turn_runner import TurnRunner


@dataclass(frozen=True)
class Compaction:
    """A summary of the messages up to number ``start``, and what the receipt says of it."""

    start: int
    summary: str
    receipt: CompactionReceipt


class SummaryInput(ResponseRequest):
    """The question for a summary of a request's conversation: the request, but for the limits of its reply."""

    @classmethod
    def of(cls, body: InputRequest) -> SummaryInput:
        return cls.model_construct(**{name: getattr(body, name) for name in type(body).model_fields})

    @property
    def compacts_if_long(self) -> bool:
        return False

    @property
    def token_limit(self) -> int | None:
        return None

    @property
    def least_tokens(self) -> int:
        return 1


async def prompt_within(
    turn: PendingTurn, body: ResponseRequest, branch: ResponseBranch, read: ReadInput
) -> tuple[PendingTurn, Prompt | None]:
    """The turn and the prompt of a response; the prompt is None if the conversation is to be compacted first. Raises a
    400 for messages that make no prompt.
    """
    if not body.compacts_if_long:
        return await first_prompt(turn, branch, read)
    facts, whole = turn.context.facts, read.conversation.messages
    limit = prompt_limit(body, facts)
    with ExitStack() as held:
        foldable = can_be_folded(whole, newest_from(whole))
        try:
            made, prompt = await first_prompt(replace(turn, claim=held), branch, read)
        except ApiError as error:
            if foldable and is_too_long(error):
                return turn, None
            raise
        if foldable and count_fed(prompt, facts) > min(limit, body.compact_threshold or limit):
            return turn, None
        turn.claim.push(held.pop_all())
        return replace(made, claim=turn.claim), prompt


async def first_prompt(turn: PendingTurn, branch: ResponseBranch, read: ReadInput) -> tuple[PendingTurn, Prompt]:
    """The turn on its line, if it may have one, and the prompt of the whole conversation."""
    if branch.session is None and branch.parent is None:
        return await recognise(turn, read.conversation)
    return turn, await make_prompt(turn.context, read)


def folding_of(turn: PendingTurn, body: InputRequest, past: SessionRecord | None, names: ToolNames) -> Folding:
    """Folds the conversation of a request that follows ``past``, on the cache that this has, or its line."""
    context, asked = turn.context, SummaryInput.of(body)
    tokens, facts = context.tokens, context.facts

    async def measure(messages: list[LoggedMessage]) -> Prompt:
        return await tokens.run(summary_prompt, asked, tokens, facts, past, names, messages)

    async def ask(messages: list[LoggedMessage]) -> tuple[PendingTurn, Prompt]:
        if past is not None:
            return turn, await measure(messages)

        def prompt_of(record: SessionRecord | None, new: list[LoggedMessage]) -> Prompt:
            if record is None:
                return summary_prompt(asked, tokens, facts, None, names, messages)
            return with_room(response_prompt(asked, tokens, facts, record, new, names), facts, "input")

        change = rendering_change_of(asked, tokens, names, messages)
        conversation = Conversation(messages, change.apply_over(rendering_in_force(messages)), prompt_of)
        aside, prompt = await recognise(replace(turn, body=asked), conversation, aside=True)
        return replace(aside, body=turn.body), prompt

    return Folding(measure, ask, "input")


def summary_prompt(
    body: SummaryInput,
    tokens: ChatTokenizer,
    facts: ModelFacts,
    past: SessionRecord | None,
    names: ToolNames,
    messages: Sequence[LoggedMessage],
) -> Prompt:
    """The prompt of ``messages``, which end with the question for a summary; it begins with the tokens of ``past`` as
    far as they are those of the messages. Blocking. Raises a 400 if it leaves no room for a summary.
    """
    led = with_instructions(fold_front(body, tokens, ())[0], past)
    record = end_within(led, common_prefix(led.messages, messages))
    new = [message for message in messages if not message.instructions]
    if record is not None:
        new = [*messages[len(record.messages) :]]
    return with_room(response_prompt(body, tokens, facts, record, new, names), facts, "input")


def end_within(record: SessionRecord, messages: int) -> SessionRecord | None:
    """The record as it was at the end of the last turn within so many messages; None if there is none."""
    if record.tokens and record.rendered == len(record.messages) <= messages:
        return record
    turn = next((turn for turn in reversed(record.turns) if turn.messages <= messages), None)
    return None if turn is None else at_turn(record, turn)


async def compact_older(
    turn: PendingTurn, body: ResponseRequest, branch: ResponseBranch, read: ReadInput
) -> Compaction:
    """Summarise all but the newest messages of a conversation. Raises a 400 if that cannot be."""
    whole = read.conversation.messages
    start = newest_from(whole)
    folding = folding_of(turn, body, branch.past, read.names)
    summary = await folding.summarise(whole[:start])
    reason: CompactionReason = "context" if body.compact_threshold is None else "threshold"
    return Compaction(start, summary, folding.receipt(reason, count_folded(whole[:start])))


def count_folded(messages: Sequence[LoggedMessage]) -> int:
    """How many messages a summary of these stands for."""
    return len(visible_messages(messages[front_of(messages) :]))


async def compacted_prompt(
    turn: PendingTurn, body: InputRequest, branch: ResponseBranch, read: ReadInput, compaction: Compaction
) -> tuple[PendingTurn, Prompt]:
    """The turn, on a line if it may have one, and the prompt that follows the summary. Raises a 400 if it leaves no
    room for a reply.
    """
    tokens, facts = turn.context.tokens, turn.context.facts
    before = read.conversation.messages
    whole = compacted_messages(before, compaction, None if branch.session is None else branch.session.name)
    change = rendering_change_of(body, tokens, read.names, whole)
    force = change.apply_over(rendering_in_force(visible_messages(before)))
    if TOOL_ORDER in tokens.rules:
        change = replace(change, tools=order_tools(visible_messages(before), change.tools or ()))
    change = replace(change, template=force.template)

    def prompt_of(record: SessionRecord | None, new: list[LoggedMessage]) -> Prompt:
        if record is not None:
            return response_prompt(body, tokens, facts, record, new, read.names)
        return restore_dropped(whole, continuation(tokens, facts, EMPTY_RECORD, visible_messages(whole), change))

    if branch.session is None and branch.parent is None and branch.past is None:
        turn, prompt = await recognise(turn, Conversation(whole, force, prompt_of))
    else:
        prompt = await tokens.run(prompt_of, None, whole)
    check_room(prompt, body, facts)
    return turn, prompt


def compacted_messages(
    messages: Sequence[LoggedMessage], compaction: Compaction, session: str | None
) -> list[LoggedMessage]:
    """The conversation with the summary in place of its older messages; in a session these stay, dropped."""
    front, start = front_of(messages), compaction.start
    made = fold_messages(messages, start, compaction.summary)
    own, newest = made[: len(made) - len(messages[start:])], messages[start:]
    id = new_id("cmp", session)
    own = [structs.replace(message, items=(entry(id, message.content),)) for message in own]
    sealed = seal_messages(made)
    own[1] = structs.replace(own[1], items=(entry(id, own[1].content, "completed", sealed),))
    kept = [structs.replace(message, dropped=True) for message in messages[front:start]]
    return [*messages[:front], *(kept if session is not None else []), *own, *newest]


async def question_prompt(turn: PendingTurn, body: InputRequest, read: ReadInput) -> Prompt:
    """The beginning of a conversation that was compacted as a whole, up to its summary: the front and the question."""
    tokens, facts = turn.context.tokens, turn.context.facts
    whole = read.conversation.messages
    front = front_of(whole)
    (question, *_) = fold_messages(whole, len(whole), "")
    question = structs.replace(question, items=(entry(new_id("cmp", None), question.content),))
    kept = [structs.replace(message, dropped=True) for message in whole[front:]]
    shown = [*whole[:front], *kept, question]
    change = rendering_change_of(body, tokens, read.names, shown)
    prompt = await tokens.run(continuation, tokens, facts, EMPTY_RECORD, visible_messages(shown), change)
    return restore_dropped(shown, prompt)


class CompactionRunner(TurnRunner):
    """Runs the turn that writes a summary as a response. Its session goes on as if the summary had been the reply to
    ``short``: the front of the conversation, and the question.
    """

    def __init__(
        self, turn: PendingTurn, prompt: Prompt, short: Prompt, rules: ReplyRules, reply: ResponseReply
    ) -> None:
        super().__init__(turn, [prompt], rules, reply)
        self._short = short

    def new_turn(self, choices: Choices) -> NewTurn:
        made = super().new_turn(choices)
        reply = made.tokens[made.prompt_tokens :]
        short = self._short
        return replace(
            made,
            tokens=[*short.ids, *reply],
            messages=[*short.messages, made.messages[-1]],
            prompt_tokens=len(short.ids),
        )


def compaction_item(messages: Sequence[LoggedMessage]) -> CompactionItem:
    """The item of the last compaction among messages."""
    entries = [message.items[0] for message in messages if message.items]
    id, sealed = next(
        (one[0], one[SEALED_AT]) for one in reversed(entries) if kind_of(one) == "cmp" and len(one) > SEALED_AT
    )
    return CompactionItem(str(id), str(sealed))


async def keep_conversation(
    context: ServerContext, branch: ResponseBranch, receipt: CompactionReceipt
) -> CompactionReceipt:
    """Keep a conversation as it is in a session of its own, since its own session goes on behind the summary; what was
    said in a chain can be continued by its responses anyway.
    """
    session = branch.session
    if session is None or branch.is_new or session.name.startswith(CHAIN):
        return receipt
    return structs.replace(receipt, kept=await keep_aside(context.log, session))
