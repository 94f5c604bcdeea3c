"""Compaction in the Messages API: a summary takes the place of a conversation's older messages (the edit
``compact_20260112``), or of all of them (``compaction``); and what requests read of it, as ``compaction`` blocks.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

import msgspec
from fastapi import Request

from server.api.anthropic.as_chat import MessagesChat, as_chat
from server.api.anthropic.context_edits import CompactEdit
from server.api.anthropic.objects import CompactionBlock
from server.api.anthropic.schemas import MessagesRequest
from server.api.anthropic.sent_messages import as_sent
from server.chat.compaction import can_be_folded, fold_messages, front_of, newest_from
from server.chat.prompts import Prompt, conversation, new_messages, rendering_change_of
from server.chat.rendering import PLAIN
from server.errors import bad_request
from server.http.sse import while_connected
from server.lines.recognition import Conversation, recognise
from server.log.identity import Session
from server.log.logged_message import LoggedMessage
from server.log.timeline import SessionRecord
from server.schemas.objects import CompactionReason, CompactionReceipt, Usage
from server.schemas.sealed_compaction import seal_messages
from server.turns.context import context_of
from server.turns.folding import Folding, keep_aside, with_room
from server.turns.naming import named_session
from server.turns.pending_turn import PendingTurn

PARAM = "messages"


@dataclass(frozen=True)
class CompactedChat:
    """A conversation that was compacted: the ``chat`` that goes on from the summary, the block that tells the client of
    it, the usage of each summary that was written, and what the receipt says.
    """

    chat: MessagesChat
    block: CompactionBlock
    spent: list[Usage]
    receipt: CompactionReceipt


async def compact(
    body: MessagesRequest, request: Request, edit: CompactEdit, reason: CompactionReason
) -> CompactedChat | None:
    """Summarise all but the newest messages, or all of them if the reply is to wait. None if there is nothing to
    summarise. Raises a 400 if that cannot be, or for a session whose log has the conversation.
    """
    context, session = context_of(request), await named_session(request, body.session_id)
    if session is not None and session.stateful:
        field = "context_management" if reason == "threshold" else "compaction"
        message = f"{field}: only a request that has the whole conversation can be compacted, without session_id."
        raise bad_request(message, field, "unsupported_value")
    chat = as_chat(body)
    context.check(chat, None)
    whole = await context.tokens.run(new_messages, chat, context.tokens)
    said = whole[:-1] if chat.goes_on else whole
    start = len(whole) if edit.pause_after_compaction else newest_from(said)
    if not can_be_folded(whole, start):
        return None
    with ExitStack() as claim:
        turn = PendingTurn(request, chat, context, None, None, None, claim)
        folding = folding_of(turn, chat, (edit.instructions or "").strip() or None)
        summary = await while_connected(request.receive, folding.summarise(whole[:start]))
    receipt = folding.receipt(reason, start - front_of(whole))
    made = fold_messages(whole, start, summary)
    sealed = None if edit.pause_after_compaction else seal_messages(made)
    if session is not None and not edit.pause_after_compaction:
        receipt = msgspec.structs.replace(receipt, kept=await keep_session(request, session))
    goes_on = as_chat(body, [as_sent(message) for message in [*whole[: front_of(whole)], *made]])
    return CompactedChat(goes_on, CompactionBlock(summary, sealed), folding.spent, receipt)


def folding_of(turn: PendingTurn, chat: MessagesChat, instructions: str | None) -> Folding:
    """Folds a conversation, on the cache of its line if it has one."""
    tokens, facts = turn.context.tokens, turn.context.facts
    change = replace(rendering_change_of(chat, tokens), whole=True, goes_on=False)

    def prompt_of(record: SessionRecord | None, new: list[LoggedMessage]) -> Prompt:
        return with_room(conversation(tokens, facts, record, new, change), facts, PARAM)

    async def measure(messages: list[LoggedMessage]) -> Prompt:
        return await tokens.run(prompt_of, None, messages)

    async def ask(messages: list[LoggedMessage]) -> tuple[PendingTurn, Prompt]:
        return await recognise(turn, Conversation(messages, change.apply_over(PLAIN), prompt_of), aside=True)

    return Folding(measure, ask, PARAM, instructions)


async def keep_session(request: Request, session: Session) -> str | msgspec.UnsetType:
    """Keep a session as it is in a new one, whose name is returned; nothing if there is none yet. Raises
    SessionBusy.
    """
    log = context_of(request).log
    async with log.holding(session.tenant, session.name):
        there = await log.summary(session.tenant, session.name) is not None
        return await keep_aside(log, session) if there else msgspec.UNSET
