"""``Branch``: the part of a line that a request agrees with, up to the end of a turn."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from msgspec import structs

from server.chat.rendering import Rendering, rendering_in_force, tool_names
from server.lines.agreement import agreement, count_kept_reasoning, differs_in_front, with_logged_ids
from server.lines.hints import Hint
from server.log.database import SessionDamaged
from server.log.logged_message import LoggedMessage
from server.log.session_log import SessionLog
from server.log.timeline import SessionRecord, TurnRecord, at_turn

MOST_COMPARED = 8  # lines that a request is compared with, those used last


@dataclass(frozen=True)
class Branch:
    """``record`` is a line of the hint, or of its parent's if not ``own``; the request agrees with it up to the end of
    ``turn``. ``past`` is the record as of then, ``new`` are the request's messages after it. ``kept``: how many
    messages have reasoning in the log only.
    """

    record: SessionRecord
    turn: TurnRecord
    past: SessionRecord
    new: list[LoggedMessage]
    own: bool
    kept: int

    @property
    def is_whole(self) -> bool:
        """Whether the request goes on where the line ends."""
        return self.past is self.record

    @property
    def without_tools(self) -> SessionRecord:
        """``past`` as if the line had no tools; its tokens have them."""
        return replace(self.past, messages=[structs.replace(message, tools=None) for message in self.past.messages])

    @property
    def rendering(self) -> Rendering:
        return rendering_in_force(self.past.messages)


@dataclass(frozen=True)
class Branches:
    """What the lines of a hint have of a request. ``agreeing`` ones come in the order in which they are to be tried:
    those first that agree with most tokens. ``records`` are the hint's own lines. ``fronted``: one that the request is
    with other instructions in front.
    """

    agreeing: list[Branch]
    records: list[SessionRecord]
    fronted: SessionRecord | None


async def read_branches(
    log: SessionLog, tenant: str, hint: Hint, messages: Sequence[LoggedMessage], rendering: Rendering
) -> Branches:
    """Compare a request's messages with the lines of its hint. A line that has got tools which the request lacks is
    also compared as it was before. Raises LogUnavailable.
    """
    found = await log.find_by_names(tenant, [*hint.names, *hint.parent_names])
    own = [summary.id for summary in found if summary.id in hint.names][:MOST_COMPARED]
    others = [summary.id for summary in found if summary.id not in hint.names][:MOST_COMPARED]
    records, agreeing = [], []
    for name in [*own, *others]:
        record = None
        with suppress(SessionDamaged):
            record = await log.get(tenant, name)
        if record is None:
            continue
        if name in hint.names:
            records.append(record)
        whole = branch_of(record, messages, name in hint.names)
        before = None if whole is None else branch_before(whole, messages, rendering)
        agreeing += [branch for branch in (whole, before) if branch is not None]
    agreeing.sort(key=lambda branch: (branch.turn.tokens, branch.own, branch.is_whole), reverse=True)
    fronted = None if agreeing else next((r for r in records if differs_in_front(r.messages, messages)), None)
    return Branches(agreeing, records, fronted)


def branch_before(branch: Branch, messages: Sequence[LoggedMessage], rendering: Rendering) -> Branch | None:
    """The part of a line before it got tools that are not in ``rendering``; None if it has none, or always had them."""
    lacking = tool_names(branch.rendering.tools) - tool_names(rendering.tools)
    if not lacking:
        return None
    came = next(i for i, message in enumerate(branch.past.messages) if lacking & tool_names(message.tools or ()))
    return branch_of(branch.record, messages, branch.own, most=came)


def branch_of(
    record: SessionRecord, messages: Sequence[LoggedMessage], own: bool, most: int | None = None
) -> Branch | None:
    """The longest part of a line that a request continues, of its first ``most`` messages; None if it agrees with no
    turn. At least one message is left, the one to be answered.
    """
    same = min(agreement(record.messages[:most], messages).messages, len(messages) - 1)
    turn = next((turn for turn in reversed(record.turns) if turn.messages <= same), None)
    if turn is None:
        return None
    end = turn.number == len(record.turns) and turn.messages == len(record.messages)
    past = record if end else at_turn(record, turn)
    ids = agreement(past.messages, messages).ids
    new = with_logged_ids(messages[turn.messages :], ids)
    return Branch(record, turn, past, new, own, count_kept_reasoning(past.messages, messages))
