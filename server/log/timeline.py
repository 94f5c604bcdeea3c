"""A session's timeline: the sum of its rows, and the row that each change adds.

A row says: keep so many turns, tokens and messages of the timeline so far, then append these. So a turn stores only its
own tokens, and edits and rewinds are rows too. Nothing here depends on a database.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from server.log.logged_message import LoggedMessage

TITLE_CHARS = 60  # of a title that is made from a message
TITLE_SOURCE = 200  # characters of the message that are read for it


class UnknownSession(Exception):
    """The tenant has no such session. HTTP 404."""


class SessionExists(Exception):
    """A session with this id exists already. HTTP 409."""


class SessionMoved(Exception):
    """Another server, or an earlier attempt of the same request, has changed the session since it was read. HTTP
    409.
    """


class NoSuchPlace(Exception):
    """The timeline has no such turn, token or message. ``param`` is "turn", "tokens" or "index", ``last`` the largest
    valid value (-1: none).
    """

    def __init__(self, param: str, last: int) -> None:
        super().__init__(f"{param} can be {last} at most")
        self.param = param
        self.last = last


@dataclass(frozen=True)
class TurnRecord:
    """One turn of the current timeline: a prompt, and the reply that ends the turn.

    ``prompt_tokens`` is the length of the timeline where the reply begins, ``tokens`` at its end (equal: it is not
    known where the reply begins); ``messages`` counts those up to its end. ``cached`` prompt tokens were reused.
    ``row`` is the one of the log that added the turn: no two turns of a session have the same. ``receipt`` is what the
    turn cost, as JSON (``server.schemas.objects.CacheReceipt``); None: not known.
    """

    number: int  # 1, 2... in the current timeline
    created: int  # Unix seconds
    prompt_tokens: int
    tokens: int
    messages: int
    cached: int
    finish_reason: str
    fingerprint: str
    row: int = 0
    receipt: str | None = None


@dataclass(frozen=True)
class SessionSummary:
    """A session without its text. ``turns``, ``tokens`` and ``messages`` are counts; times are Unix seconds.

    ``used`` is the time of the last change of its timeline. ``fingerprint`` is that of what gives the tokens their
    meaning (``Tokens.fingerprint``), "" while no turn was logged. ``parent`` is the session it was forked from and the
    turn it was forked at. ``title``: see ``title_of``.
    """

    id: str
    created: int
    used: int
    turns: int
    tokens: int
    messages: int
    fingerprint: str
    metadata: dict[str, str]
    ttl: int | None  # seconds from each change to the end of the session
    expires: int | None
    pinned_until: int | None
    parent: tuple[str, int] | None
    title: str = ""


_MARK = re.compile(r"^(?:#{1,6}|>|[-*+](?: \[[ xX]\])?) +")  # of a heading, a quotation, an item or a task
_BOLD_OR_CODE = re.compile(r"(?<![\w*`])(\*\*|`+)(?=[^\s*`])(.+?)(?<=[^\s*`])\1(?![\w*`])")


def title_of(metadata: Mapping[str, str], first: str) -> str:
    """The title of a session: that in its metadata, or else the beginning of the ``first`` message of its user, without
    the mark of Markdown with which it begins and those of bold and code; "" if there is neither.
    """
    if title := metadata.get("title"):
        return title
    line = " ".join(first[:TITLE_SOURCE].replace("\0", " ").split())
    line = _BOLD_OR_CODE.sub(r"\2", _MARK.sub("", line) or line)
    if len(line) <= TITLE_CHARS:
        return line
    words, _, _ = line[:TITLE_CHARS].rpartition(" ")
    return f"{words or line[:TITLE_CHARS]}…"


@dataclass(frozen=True)
class SessionRecord:
    """A session as of its last row. ``tokens`` are ids of the tokenizer with this ``fingerprint``.
    ``messages[:rendered]`` are covered by ``tokens``; later messages (given at creation, or edited) are in the log but
    not yet among the tokens: the next turn renders them. ``version`` identifies this state of the log for ``expect``:
    opaque, greater than 0, unique. The other fields are as in SessionSummary.
    """

    id: str
    tokens: list[int]
    messages: list[LoggedMessage]  # must not be changed
    fingerprint: str
    created: int
    rendered: int = -1  # left out: all of them
    used: int = 0
    turns: tuple[TurnRecord, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)
    ttl: int | None = None
    expires: int | None = None
    pinned_until: int | None = None
    parent: tuple[str, int] | None = None
    version: int = 0

    def __post_init__(self) -> None:
        if self.rendered < 0:
            object.__setattr__(self, "rendered", len(self.messages))

    @property
    def summary(self) -> SessionSummary:
        """The same without text."""
        asked = (said.content for said in self.messages if said.role == "user")
        first = next((text for text in asked if text.strip()), "")
        return SessionSummary(
            self.id,
            self.created,
            self.used,
            len(self.turns),
            len(self.tokens),
            len(self.messages),
            self.fingerprint,
            self.metadata,
            self.ttl,
            self.expires,
            self.pinned_until,
            self.parent,
            title_of(self.metadata, first),
        )


@dataclass(frozen=True)
class NewTurn:
    """A turn to commit. ``tokens`` and ``messages`` are the session's whole timeline including it, and must not be
    changed afterwards. Its reply is the last of ``messages`` and begins at token ``prompt_tokens`` (None: unknown).
    ``model``: the name of the one that wrote it; "": unknown. The other fields are as in TurnRecord.
    """

    tokens: Sequence[int]
    messages: Sequence[LoggedMessage]
    fingerprint: str
    finish_reason: str
    prompt_tokens: int | None = None
    cached: int = 0
    receipt: str | None = None
    model: str = ""


@dataclass(frozen=True)
class RewindPoint:
    """The target of a rewind: ``turns`` turns and ``tokens`` tokens are left. ``reply`` is the token at which a reply
    begins that is cut: ``record.tokens[reply:tokens]`` is left of it. None: no reply is cut.
    """

    turns: int
    tokens: int
    reply: int | None = None


def locate(record: SessionRecord, tokens: int) -> RewindPoint:
    """The place that a rewind to the first ``tokens`` tokens leads to: within a reply, exactly there; within a prompt,
    the end of the reply before it. Raises NoSuchPlace("tokens").
    """
    return place_of_token(record.turns, tokens)


def drop_reply(record: SessionRecord) -> SessionRecord:
    """The record as it was when its last reply was asked for, to generate another one. Nothing is written: the old
    reply is replaced when the new turn commits (``expect=record.version``), and stays if it never does.

    ``tokens`` are the very prompt of the reply, and ``rendered`` is all of ``messages`` then. Where these ids are not
    known (an edited or seeded reply, or a turn that was logged without ``prompt_tokens``) they go back to the end of
    the reply before, and the messages behind are unrendered. A record that does not end with a reply is returned as
    it is.
    """
    if not record.messages or record.messages[-1].role != "assistant":
        return record
    messages = record.messages[:-1]
    if record.rendered < len(record.messages):
        return replace(record, messages=messages, rendered=min(record.rendered, len(messages)))
    *kept, last = record.turns  # a rendered reply is the end of a turn
    turns = tuple(kept)
    if last.prompt_tokens < last.tokens:
        tokens, rendered = last.prompt_tokens, len(messages)
    else:
        tokens, rendered = (turns[-1].tokens, turns[-1].messages) if turns else (0, 0)
    return replace(record, tokens=record.tokens[:tokens], messages=messages, rendered=rendered, turns=turns)


def at_turn(record: SessionRecord, turn: TurnRecord) -> SessionRecord:
    """The record at the end of one of its turns, as the beginning of another session: its ``version`` is 0."""
    return replace(
        record,
        tokens=record.tokens[: turn.tokens],
        messages=record.messages[: turn.messages],
        rendered=turn.messages,
        turns=record.turns[: turn.number],
        fingerprint=turn.fingerprint,
        version=0,
    )


@dataclass(frozen=True)
class Row:
    """One row. ``prompt_tokens`` is set in rows that end with a reply: these add a turn."""

    kind: str  # turn | create | rewind | edit | fork | import
    created: int
    fingerprint: str
    keep_turns: int = 0
    keep_tokens: int = 0
    tokens: array[int] = field(default_factory=lambda: array("i"))
    keep_messages: int = 0
    messages: Sequence[LoggedMessage] = ()
    prompt_tokens: int | None = None
    cached: int = 0
    finish_reason: str = ""
    receipt: str | None = None  # of the turn that it adds


@dataclass
class Timeline:
    """The sum of a session's rows, up to row ``number``. The tokens always end where the last turn ends."""

    number: int = 0
    fingerprint: str = ""
    tokens: array[int] = field(default_factory=lambda: array("i"))
    messages: list[LoggedMessage] = field(default_factory=list)
    turns: list[TurnRecord] = field(default_factory=list)

    @property
    def rendered(self) -> int:
        """How many messages the tokens cover."""
        return self.turns[-1].messages if self.turns else 0

    def apply(self, row: Row) -> None:
        del self.turns[row.keep_turns :]
        del self.tokens[row.keep_tokens :]
        del self.messages[row.keep_messages :]
        self.tokens.extend(row.tokens)
        self.messages.extend(row.messages)
        self.number += 1
        self.fingerprint = row.fingerprint
        if row.prompt_tokens is not None:
            self.turns.append(
                TurnRecord(
                    len(self.turns) + 1,
                    row.created,
                    row.prompt_tokens,
                    len(self.tokens),
                    len(self.messages),
                    row.cached,
                    row.finish_reason,
                    row.fingerprint,
                    self.number,
                    row.receipt,
                )
            )

    def ends(self, turns: int) -> tuple[int, int]:
        """Tokens and messages at the end of that many turns."""
        return (self.turns[turns - 1].tokens, self.turns[turns - 1].messages) if turns else (0, 0)


def turns_within(turns: Sequence[TurnRecord], tokens: int, messages: int) -> int:
    """How many turns end within so many tokens and messages."""
    return sum(turn.tokens <= tokens and turn.messages <= messages for turn in turns)


def turn_of_row(turns: Sequence[TurnRecord], row: int) -> TurnRecord | None:
    """The turn that row ``row`` added; None if the timeline no longer has it."""
    return next((turn for turn in turns if turn.row == row), None)


def place_of_turn(turns: Sequence[TurnRecord], number: int) -> RewindPoint:
    """The end of a turn; 0 is the beginning. Raises NoSuchPlace("turn")."""
    if not 0 <= number <= len(turns):
        raise NoSuchPlace("turn", len(turns))
    return RewindPoint(number, turns[number - 1].tokens if number else 0)


def place_of_token(turns: Sequence[TurnRecord], tokens: int) -> RewindPoint:
    """See ``locate``. Raises NoSuchPlace."""
    if not 0 <= tokens <= (turns[-1].tokens if turns else 0):
        raise NoSuchPlace("tokens", turns[-1].tokens if turns else 0)
    before = sum(turn.tokens <= tokens for turn in turns)
    if before < len(turns) and turns[before].prompt_tokens < tokens < turns[before].tokens:
        return RewindPoint(before + 1, tokens, turns[before].prompt_tokens)
    return place_of_turn(turns, before)


def common_prefix(old: Sequence[Any], new: Sequence[Any]) -> int:
    """The length of the common prefix of two sequences of one type. Bisects, so that the comparison runs in C."""
    low, high = 0, min(len(old), len(new))  # old[:low] == new[:low] always
    if old[:high] == new[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if old[low:middle] == new[low:middle]:
            low = middle
        else:
            high = middle
    return low
