"""The rows that change a timeline: a turn, a rewind, an edit, a copy."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from msgspec import structs

from server.log.logged_message import LoggedMessage
from server.log.timeline import NewTurn, NoSuchPlace, RewindPoint, Row, Timeline, common_prefix, turns_within
from server.media.media import PlacedMedia


def turn_row(timeline: Timeline, turn: NewTurn, now: int) -> Row:
    """The row that commits a turn: it keeps what the turn's timeline and the one so far have in common, and the turns
    that end within that. The row always contains the reply, also if it equals the one that it replaces, so that a
    replay needs no other row.
    """
    tokens, messages = array("i", turn.tokens), turn.messages
    prompt_tokens = len(tokens) if turn.prompt_tokens is None else turn.prompt_tokens
    keep_tokens = common_prefix(timeline.tokens, tokens)
    is_reply = bool(messages) and messages[-1].role == "assistant"
    keep_messages = common_prefix(timeline.messages, messages[:-1] if is_reply else messages)
    return Row(
        "turn",
        now,
        turn.fingerprint,
        turns_within(timeline.turns, min(keep_tokens, prompt_tokens), keep_messages),
        keep_tokens,
        tokens[keep_tokens:],
        keep_messages,
        messages[keep_messages:],
        prompt_tokens,
        turn.cached,
        turn.finish_reason,
        turn.receipt,
    )


def rewind_row(timeline: Timeline, place: RewindPoint, reply: LoggedMessage | None, now: int) -> Row:
    """The row that cuts the timeline back to a place. ``reply`` is what is left of a reply that is cut.
    Raises ValueError.
    """
    if place.reply is None:
        tokens, messages = timeline.ends(place.turns)
        return Row("rewind", now, timeline.fingerprint, place.turns, tokens, keep_messages=messages)
    if reply is None:
        raise ValueError("a reply is cut here: what is left of it is needed")
    cut = timeline.turns[place.turns - 1]
    return Row(
        "rewind",
        now,
        timeline.fingerprint,
        place.turns - 1,
        place.tokens,
        keep_messages=cut.messages - 1,
        messages=[reply],
        prompt_tokens=cut.prompt_tokens,
        cached=cut.cached,
        finish_reason="length",
        receipt=cut.receipt,
    )


def edit_row(timeline: Timeline, index: int, content: str, media: Sequence[PlacedMedia], now: int) -> Row:
    """The row that replaces the content of a message, text and media, and drops everything after it. Raises
    NoSuchPlace("index").
    """
    if not 0 <= index < len(timeline.messages):
        raise NoSuchPlace("index", len(timeline.messages) - 1)
    return revise_row(
        timeline, index, [structs.replace(timeline.messages[index], content=content, media=(*media,))], now
    )


def revise_row(timeline: Timeline, keep: int, messages: Sequence[LoggedMessage], now: int) -> Row:
    """The row that replaces all messages from number ``keep`` on; the tokens are cut back to the end of the last reply
    before. Raises NoSuchPlace("index").
    """
    if not 0 <= keep <= len(timeline.messages):
        raise NoSuchPlace("index", len(timeline.messages))
    turns = sum(turn.messages <= keep for turn in timeline.turns)
    tokens = timeline.ends(turns)[0]
    return Row("edit", now, timeline.fingerprint, turns, tokens, keep_messages=keep, messages=messages)


def copy_rows(timeline: Timeline, turns: int | None, kind: str, now: int) -> Iterator[Row]:
    """Rows that rebuild the same timeline from nothing: one per turn, and one for messages after the last turn. With
    ``turns``, only up to the end of that many. Raises NoSuchPlace("turn").
    """
    if turns is not None and not 0 <= turns <= len(timeline.turns):
        raise NoSuchPlace("turn", len(timeline.turns))
    tokens = messages = 0
    for turn in timeline.turns[:turns]:
        yield Row(
            kind,
            turn.created,
            turn.fingerprint,
            turn.number - 1,
            tokens,
            timeline.tokens[tokens : turn.tokens],
            messages,
            timeline.messages[messages : turn.messages],
            turn.prompt_tokens,
            turn.cached,
            turn.finish_reason,
            turn.receipt,
        )
        tokens, messages = turn.tokens, turn.messages
    rest = timeline.messages[messages:] if turns is None else []
    # Also without messages: the fingerprint of the tokens can be a later one than that of the last turn kept.
    kept = len(timeline.turns) if turns is None else turns
    yield Row(kind, now, timeline.fingerprint, kept, tokens, keep_messages=messages, messages=rest)
