"""Finds the line that a request continues, forks or begins, and makes its prompt.

A line is only appended to. A request that leaves its line in the middle begins another one there, and a request whose
line is busy does too. Whatever goes wrong, the request runs as one without a hint does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from msgspec import UNSET

from server.chat.prompts import Prompt, check_room
from server.chat.rendering import Rendering
from server.errors import ApiError
from server.lines.branch import Branch, Branches, read_branches
from server.lines.hints import Hint, hint_of
from server.lines.side_calls import is_aside, is_marked
from server.log.claims import SessionBusy
from server.log.database import LogUnavailable
from server.log.identity import Session
from server.log.logged_message import LoggedMessage
from server.log.quota import QuotaReached
from server.log.response_rows import TurnExtras
from server.log.timeline import SessionMoved, SessionRecord
from server.schemas.adaptations import adapt
from server.schemas.objects import LineOutcome, LineReceipt
from server.turns.pending_turn import LineTurn, PendingTurn

logger = logging.getLogger("warmturn.lines")

TITLE_CHARS = 60
MOST_TRIED = 3  # branches whose prompts are made
PromptMaker = Callable[[SessionRecord | None, list[LoggedMessage]], Prompt]


@dataclass(frozen=True)
class Conversation:
    """A request's whole conversation with its ``rendering``. ``make_prompt`` makes the prompt of messages that follow a
    record (None: of all messages, whatever it is given); it blocks, and raises a 400 for messages that make no prompt.
    """

    messages: list[LoggedMessage]
    rendering: Rendering
    make_prompt: PromptMaker


async def recognise(
    turn: PendingTurn, conversation: Conversation, *, aside: bool = False
) -> tuple[PendingTurn, Prompt]:
    """The turn on the line that the request belongs to, if it has a hint and a line can take it, and its prompt. The
    turn's claim then holds the line. ``aside``: it is a side call, which no line takes. Raises a 400 for messages that
    make no prompt.
    """
    if (hint := line_hint(turn)) is not None:
        try:
            return await Recognition(turn, conversation, hint, aside).run()
        except QuotaReached:
            logger.debug("a request runs without its line: its key's tenant keeps as much as it may")
        except (LogUnavailable, SessionMoved) as error:
            logger.warning("a request runs without its line: %s", error)
    return turn, await turn.context.tokens.run(conversation.make_prompt, None, conversation.messages)


def line_hint(turn: PendingTurn) -> Hint | None:
    """The hint by which a turn may be recognised; None if it has a session, or runs on no line."""
    if turn.session is not None or not turn.context.line_seconds or not turn.body.may_continue_line:
        return None
    return hint_of(turn.request.headers, turn.body.hints)


@dataclass(frozen=True)
class Recognition:
    """One request with a hint."""

    turn: PendingTurn
    conversation: Conversation
    hint: Hint
    aside: bool = False

    async def run(self) -> tuple[PendingTurn, Prompt]:
        """See ``recognise``. Raises LogUnavailable."""
        turn, conversation, hint = self.turn, self.conversation, self.hint
        found = await read_branches(
            turn.context.log, turn.request.state.tenant, hint, conversation.messages, conversation.rendering
        )
        branch, prompt = await self._continue(found)
        if prompt is None:
            prompt = await turn.context.tokens.run(conversation.make_prompt, None, conversation.messages)
        if self.aside or self._is_side(found, branch):
            return self._without_line("side", branch), prompt
        if branch is None:
            parent = found.agreeing[0].record if found.agreeing else found.fronted
            extras = TurnExtras(parent=None if parent is None else (parent.id, 0))
            extras = extras if parent is not None or not hint.agent else await self._parent_of_agent(extras)
            return await self._begin("begun" if parent is None else "rewritten", extras, None), prompt
        if branch.is_whole and branch.own and (continued := await self._append(branch)) is not None:
            return continued, prompt
        extras = TurnExtras(parent=(branch.record.id, branch.turn.number), copies=True)
        return await self._begin("forked", extras, branch), prompt

    async def _continue(self, found: Branches) -> tuple[Branch | None, Prompt | None]:
        """The first branch whose tokens are the beginning of the prompt, and that prompt. A template that writes a line
        anew with every turn is no reason to leave it; reasoning that leaves no room for a reply is. A summary that is
        asked for without the tools has those of the line at the front of its prompt."""
        for branch in found.agreeing[:MOST_TRIED]:
            past = branch.without_tools if self._lacks_tools(branch) else branch.past
            try:
                prompt = await self.turn.context.tokens.run(self.conversation.make_prompt, past, branch.new)
                check_room(prompt, self.turn.body, self.turn.context.facts)
            except ApiError:
                continue  # then the request alone says what is wrong with it
            extends = prompt.ids[: len(branch.past.tokens)] == branch.past.tokens
            if extends or (branch.own and branch.is_whole and branch.rendering == self.conversation.rendering):
                return branch, prompt
        return None, None

    def _is_side(self, found: Branches, branch: Branch | None) -> bool:
        """Whether the request is a side call."""
        turn, conversation = self.turn, self.conversation
        if is_marked(turn.request.headers, turn.body.token_limit):
            return True
        if branch is not None or found.agreeing:
            return self._lacks_tools(branch or found.agreeing[0])
        return found.fronted is None and is_aside(
            self.hint, conversation.messages, conversation.rendering, found.records
        )

    def _lacks_tools(self, branch: Branch) -> bool:
        """Whether the request is the conversation without its tools, as a summary of it is asked for; with a reply that
        the line does not have, it goes on without them.
        """
        if self.conversation.rendering.tools or not branch.rendering.tools:
            return False
        return not any(message.role == "assistant" for message in branch.new)

    async def _append(self, branch: Branch) -> PendingTurn | None:
        """The turn at the end of a line; None if the line is busy or has changed."""
        session = Session(self.turn.request.state.tenant, branch.record.id, stateful=True)
        with ExitStack() as held:
            try:
                record = await self.turn.context.open(session, held)
            except SessionBusy:
                return None
            if record is None or record.version != branch.record.version:
                return None
            self.turn.claim.push(held.pop_all())
        return self._on_line("continued", session, TurnExtras(), branch)

    async def _begin(self, outcome: LineOutcome, extras: TurnExtras, branch: Branch | None) -> PendingTurn:
        """The turn on a new line; unlogged if all names of the hint are busy."""
        tenant, context = self.turn.request.state.tenant, self.turn.context
        used = {
            summary.id: index for index, summary in enumerate(await context.log.find_by_names(tenant, self.hint.names))
        }
        for name in sorted(self.hint.names, key=lambda name: -used.get(name, len(used))):
            session = Session(tenant, name, stateful=True)
            if branch is not None and name == branch.record.id:
                continue
            with ExitStack() as held:
                try:
                    record = await context.open(session, held)
                except SessionBusy:
                    continue
                if record is not None:
                    if name not in used:
                        continue  # another request has just begun it
                    life = await context.log.delete(tenant, name)
                    context.engine.forget(tenant, name, life)
                self.turn.claim.push(held.pop_all())
            metadata = {"title": title_of(self.conversation.messages), "hint": self.hint.via, "agent": self.hint.agent}
            metadata = {name: value for name, value in metadata.items() if value}
            extras = replace(extras, ttl=context.line_seconds, metadata=metadata)
            return self._on_line(outcome, session, extras, branch)
        return self._without_line("busy", branch)

    async def _parent_of_agent(self, extras: TurnExtras) -> TurnExtras:
        """The line of the agent that has started this one: it shares nothing with it."""
        parents = await self.turn.context.log.find_by_names(self.turn.request.state.tenant, self.hint.parent_names)
        return replace(extras, parent=(parents[0].id, 0)) if parents else extras

    def _on_line(
        self, outcome: LineOutcome, session: Session, extras: TurnExtras, branch: Branch | None
    ) -> PendingTurn:
        """The turn on a line that the claim holds."""
        record = None
        if branch is not None:
            note_kept_reasoning(branch)
            record = branch.record if outcome == "continued" else replace(branch.past, version=0)
        begun_from = extras.parent if record is None or record.parent is None else record.parent
        parent = begun_from[0] if self.hint.agent and begun_from is not None else None  # it waits for its agent
        line = LineTurn(self._receipt(outcome, branch, session.name), extras, parent=parent)
        return replace(self.turn, session=session, record=record, idempotency=None, line=line)

    def _without_line(self, outcome: LineOutcome, branch: Branch | None) -> PendingTurn:
        """The turn without a line; its prompt begins with the tokens of ``branch``."""
        if branch is not None:
            note_kept_reasoning(branch)
            if self._lacks_tools(branch):
                adapt("tools_kept", "tools")
        record = None if branch is None else branch.past
        main = self.hint.names[0] if branch is None else branch.record.id
        line = LineTurn(self._receipt(outcome, branch), side=outcome == "side", parent=main)
        return replace(self.turn, record=record, line=line)

    def _receipt(self, outcome: LineOutcome, branch: Branch | None, name: str | None = None) -> LineReceipt:
        """What the client is told; it is counted too."""
        context = self.turn.context
        context.metrics.lines.add(1, outcome)
        if outcome == "side":
            context.side_calls.add(self.turn.request.state.tenant, self.hint.names[0])
        turns = 0 if branch is None else branch.turn.number
        id = name or (UNSET if branch is None else branch.record.id)
        return LineReceipt(outcome, self.hint.via, turns, id)


def note_kept_reasoning(branch: Branch) -> None:
    """Name it in the receipt that the prompt has reasoning which the client has left out."""
    for _ in range(branch.kept):
        adapt("reasoning_kept", "messages")


def title_of(messages: Sequence[LoggedMessage]) -> str:
    """How lists show a line: the beginning of what the user says first; "" if the user says nothing."""
    said = next((message.content for message in messages if message.role == "user"), "")
    return " ".join(said[: 4 * TITLE_CHARS].split())[:TITLE_CHARS]
