"""The portable form of a session's timeline, plain JSON, for export from one log and import to another.

``msgspec.json.encode`` writes it and ``msgspec.json.decode(data, type=PortableLog)`` reads it; bytes are base64 there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import msgspec

from scheduler.protocol import unpack_ids
from server.log.logged_message import LoggedMessage
from server.log.timeline import Row, Timeline
from server.log.timeline_rows import copy_rows
from server.media.media import PlacedMedia

FORMAT = 1
LARGEST = 2**31 - 1


class InvalidLog(Exception):
    """The data is not the log of a session. ``message`` says why, without quoting it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class PortableTurn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tokens (int32) and messages that a turn adds to the turns before it. ``prompt_tokens`` counts from the
    beginning of the timeline, see TurnRecord.
    """

    created: int
    fingerprint: str
    finish_reason: str
    prompt_tokens: int
    cached: int
    tokens: bytes
    messages: list[LoggedMessage]


class PortableLog(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A timeline. ``fingerprint`` is that of the tokenizer; ``rest`` are the messages after the last turn. Times are
    Unix seconds.
    """

    format: int
    created: int
    fingerprint: str
    turns: list[PortableTurn]
    rest: list[LoggedMessage]

    @property
    def tokens(self) -> array[int]:
        """The ids of the whole timeline. Raises InvalidLog."""
        ids: array[int] = array("i")
        for turn in self.turns:
            ids.extend(own_ids(turn))
        return ids

    @property
    def media(self) -> list[PlacedMedia]:
        messages = [*(message for turn in self.turns for message in turn.messages), *self.rest]
        return [one for message in messages for one in message.media]

    @property
    def digests(self) -> set[str]:
        return {one.digest for one in self.media}


def export_timeline(timeline: Timeline, created: int) -> PortableLog:
    """A timeline in its portable form."""
    *turns, rest = copy_rows(timeline, None, "import", 0)
    return PortableLog(
        FORMAT,
        created,
        timeline.fingerprint,
        [
            PortableTurn(
                row.created,
                row.fingerprint,
                row.finish_reason,
                row.prompt_tokens or 0,
                row.cached,
                row.tokens.tobytes(),
                [*row.messages],
            )
            for row in turns
        ],
        [*rest.messages],
    )


def rows_of(log: PortableLog, now: int) -> Iterator[Row]:
    """The rows of the timeline. Raises InvalidLog for a log that no export could have written."""
    if log.format != FORMAT:
        raise InvalidLog(f"the log has format {log.format}, this version reads format {FORMAT}")
    if not 0 <= log.created <= now + 86400 or len(log.fingerprint) > 128:
        raise InvalidLog("created or fingerprint is invalid")
    tokens = messages = 0
    for number, turn in enumerate(log.turns):
        ids = own_ids(turn)
        check_messages(turn.messages)
        before, tokens = tokens, tokens + len(ids)
        if not (before <= turn.prompt_tokens <= tokens <= LARGEST and 0 <= turn.cached <= turn.prompt_tokens):
            raise InvalidLog("the lengths of a turn contradict each other")
        if not turn.messages or turn.messages[-1].role != "assistant":
            raise InvalidLog("a turn does not end with a reply")
        if not 0 <= turn.created <= now + 86400 or len(turn.fingerprint) > 128 or len(turn.finish_reason) > 32:
            raise InvalidLog("created, fingerprint or finish_reason of a turn is invalid")
        yield Row(
            "import",
            turn.created,
            turn.fingerprint,
            number,
            before,
            ids,
            messages,
            turn.messages,
            turn.prompt_tokens,
            turn.cached,
            turn.finish_reason,
        )
        messages += len(turn.messages)
    check_messages(log.rest)
    yield Row("import", now, log.fingerprint, len(log.turns), tokens, keep_messages=messages, messages=log.rest)


def own_ids(turn: PortableTurn) -> array[int]:
    """The ids that a turn adds. Raises InvalidLog."""
    if len(turn.tokens) % 4:
        raise InvalidLog("the tokens of a turn are incomplete")
    ids = unpack_ids(turn.tokens)
    if ids and min(ids) < 0:
        raise InvalidLog("a token id is negative")
    return ids


def check_messages(messages: list[LoggedMessage]) -> None:
    """Check that tool messages name their calls, and that other messages do not. Raises InvalidLog."""
    for message in messages:
        if message.role == "tool" and not message.tool_call_id:
            raise InvalidLog("a tool message does not name its call")
        if message.role != "tool" and message.tool_call_id:
            raise InvalidLog("a message that is no tool message names a call")
