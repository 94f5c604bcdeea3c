"""Structs of the answers about sessions. Times are Unix seconds, lengths are tokens."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from cache.tier import Tier, TierHolding
from server.engine.engine import EngineDied, EngineUnavailable
from server.log.database import SessionDamaged
from server.log.identity import Session
from server.log.logged_message import LoggedMessage
from server.log.search_index import Hit
from server.log.timeline import SessionRecord, SessionSummary
from server.media.media import Media, without_media
from server.schemas.items import bare
from server.schemas.objects import CacheReceipt
from server.turns.context import ServerContext
from server.turns.running_turns import RunningTurn
from server.turns.side_call_counts import LINE

PREVIEW = 120  # characters
INSPECT_SECONDS = 5.0  # for the engine to tell, between two of its steps; then kv is null


class Parent(msgspec.Struct, frozen=True):
    """Where a fork comes from: the session, and the last of its turns that was copied."""

    session_id: str
    turn: int


class ImportReport(msgspec.Struct, frozen=True):
    """What a capsule brought. ``kv_tokens`` are cached; where these are not all, ``reason`` says why."""

    turns: int
    tokens: int
    kv_tokens: int
    reason: str | None


class SessionObject(msgspec.Struct, frozen=True, tag_field="object", tag="session"):
    """A session. ``turns`` and ``messages`` are counts. ``kv`` has the tiers that hold something of it, null while no
    engine is ready; lists carry neither that nor ``running``. A ``line`` is kept for a client that has not asked for a
    session; ``side_calls`` are those beside its conversation since the server's start. ``title`` is that of its
    metadata, or else the beginning of its first user's message. ``hits``: of a search."""

    id: str
    created_at: int
    last_used_at: int
    turns: int
    tokens: int
    messages: int
    metadata: dict[str, str]
    ttl_seconds: int | None
    expires_at: int | None
    pinned_until: int | None
    parent: Parent | None
    fingerprint: str
    model_matches: bool
    kv: dict[Tier, TierHolding] | UnsetType | None = UNSET
    running: bool | UnsetType = UNSET
    imported: ImportReport | UnsetType = UNSET
    kind: Literal["session", "line"] = "session"
    side_calls: int | UnsetType = UNSET
    title: str = ""
    hits: list[Hit] | UnsetType = UNSET


class TurnObject(msgspec.Struct, frozen=True, tag_field="object", tag="session.turn"):
    """A turn. ``id`` is the same in a session and its forks as long as they agree up to its end. ``prompt_tokens`` is
    the whole timeline before its reply, of which ``cached_tokens`` were reused. ``cache`` is the receipt that came with
    the reply, null for turns of imported and older logs; ``preview`` the beginning of the last user message, with its
    ``media`` in brackets, and ``reply_preview`` that of the reply, "" where it has no words."""

    id: str
    number: int
    created_at: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish_reason: str
    cache: CacheReceipt | None
    preview: str
    reply_preview: str
    media: list[Media] | UnsetType = UNSET


class MessageObject(msgspec.Struct, frozen=True, tag_field="object", tag="session.message"):
    """A message. ``turn`` is the one that brought it; null while no turn has answered it. ``tools`` are those that hold
    from this message on, ``template`` what the chat template is told besides. ``media`` stand in the content, each
    behind so many characters (``at``); `/v1/media/{digest}` has the bytes."""

    index: int
    role: str
    content: str
    turn: int | None
    name: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET
    tool_call_id: str | UnsetType = UNSET
    tools: list[dict[str, Any]] | UnsetType = UNSET
    template: dict[str, Any] | UnsetType = UNSET
    media: list[dict[str, Any]] | UnsetType = UNSET


class RunningTurnObject(msgspec.Struct, frozen=True, tag_field="object", tag="session.running_turn"):
    """A turn that runs in the background. ``messages`` are those that it adds before its reply; the reply will be
    message ``first_message`` plus their number."""

    session_id: str
    created_at: int
    first_message: int
    messages: list[MessageObject]


class MetadataKey(msgspec.Struct, frozen=True, tag_field="object", tag="session.metadata_key"):
    """A key of sessions' metadata, and how many sessions have it."""

    key: str
    sessions: int


class SessionBranch(msgspec.Struct, frozen=True, tag_field="object", tag="session.branch"):
    """A session of a tree with its turns; null where its log is damaged."""

    session: SessionObject
    turns: list[TurnObject] | None


class SessionTree(msgspec.Struct, frozen=True, tag_field="object", tag="session.tree"):
    """A session, what it was forked from and all forks of these, parents first. ``root`` may be no more."""

    root: str
    data: list[SessionBranch]
    has_more: bool


class SessionCancelled(msgspec.Struct, frozen=True, tag_field="object", tag="session.cancelled"):
    """A session none of whose earlier turns runs any more; ``cancelled``: whether one was stopped for that."""

    id: str
    cancelled: bool


def session_object(context: ServerContext, tenant: str, summary: SessionSummary) -> SessionObject:
    """A session as lists show it."""
    facts = context.engine.facts
    is_line = summary.id.startswith(LINE)
    return SessionObject(
        id=summary.id,
        created_at=summary.created,
        last_used_at=summary.used,
        turns=summary.turns,
        tokens=summary.tokens,
        messages=summary.messages,
        metadata=summary.metadata,
        ttl_seconds=summary.ttl,
        expires_at=summary.expires,
        pinned_until=summary.pinned_until,
        parent=None if summary.parent is None else Parent(*summary.parent),
        fingerprint=summary.fingerprint,
        model_matches=facts is not None and summary.fingerprint in ("", context.fingerprint, *context.by_fingerprint()),
        kind="line" if is_line else "session",
        side_calls=context.side_calls.beside(tenant, summary.id) if is_line else UNSET,
        title=summary.title,
    )


def found_object(context: ServerContext, tenant: str, summary: SessionSummary, hits: Sequence[Hit]) -> SessionObject:
    """A session as searches show it."""
    return msgspec.structs.replace(session_object(context, tenant, summary), hits=[*hits])


async def live_session_object(context: ServerContext, session: Session, summary: SessionSummary) -> SessionObject:
    """A session with where its cache lies now and whether a turn of it runs."""
    made = session_object(context, session.tenant, summary)
    try:
        async with asyncio.timeout(INSPECT_SECONDS):
            inspected = await context.engine.inspect(session.tenant, session.name)
    except (EngineUnavailable, EngineDied, TimeoutError):
        return msgspec.structs.replace(made, kv=None, running=False)
    # A tier may still hold what the log has left: a rewind reaches it with the next turn.
    held = {tier: TierHolding(min(held.tokens, summary.tokens), held.bytes) for tier, held in inspected.tiers.items()}
    return msgspec.structs.replace(made, kv=held, running=inspected.running)


def turn_objects(record: SessionRecord) -> list[TurnObject]:
    """The turns of the current timeline."""
    made = []
    ids, digest = array("i", record.tokens), hashlib.blake2b(digest_size=12)
    tokens = messages = 0
    for turn in record.turns:
        # Of all that a fork copies: an equal reply that was generated another time is another turn, its receipt tells.
        digest.update(f"{turn.created} {turn.prompt_tokens} {turn.tokens} {turn.receipt} ".encode())
        digest.update(ids[tokens : turn.tokens].tobytes())
        said = record.messages[messages : turn.messages]
        made.append(
            TurnObject(
                f"turn_{digest.hexdigest()}",
                turn.number,
                turn.created,
                turn.prompt_tokens,
                turn.tokens - turn.prompt_tokens,
                turn.cached,
                turn.finish_reason,
                None if turn.receipt is None else msgspec.json.decode(turn.receipt, type=CacheReceipt),
                preview(said, "user"),
                preview(said, "assistant"),
                last_media(said) or UNSET,
            )
        )
        tokens, messages = turn.tokens, turn.messages
    return made


def preview(messages: Sequence[LoggedMessage], role: str) -> str:
    """The beginning of what this role said last; "" if it said nothing."""
    said = next((message for message in reversed(messages) if message.role == role), None)
    return "" if said is None else without_media(said.content, said.media)[:PREVIEW]


def last_media(messages: Sequence[LoggedMessage]) -> list[Media]:
    """The media that a user showed last."""
    media = next((message.media for message in reversed(messages) if message.role == "user"), ())
    return [Media(one.kind, one.digest, one.format, one.width, one.height) for one in media]


async def session_branch(context: ServerContext, tenant: str, summary: SessionSummary) -> SessionBranch | None:
    """One session of a tree; None if it was deleted meanwhile."""
    session = Session(tenant, summary.id, stateful=True)
    try:
        record = await context.log.get(tenant, summary.id)
    except SessionDamaged:
        return SessionBranch(session_object(context, tenant, summary), None)
    if record is None:
        return None
    return SessionBranch(
        await live_session_object(context, session, record.summary), await asyncio.to_thread(turn_objects, record)
    )


def running_turn_object(session: str, turn: RunningTurn) -> RunningTurnObject:
    said = [message_object(turn.first + index, None, message) for index, message in enumerate(turn.messages)]
    return RunningTurnObject(session, turn.created, turn.first, said)


def message_object(index: int, turn: int | None, message: LoggedMessage) -> MessageObject:
    return MessageObject(index=index, turn=turn, **msgspec.to_builtins(bare(message)))


def message_objects(record: SessionRecord) -> list[MessageObject]:
    """All messages, each with the turn that brought it."""
    made = []
    turns = iter(record.turns)
    turn = next(turns, None)
    for index, message in enumerate(record.messages):
        while turn is not None and turn.messages <= index:
            turn = next(turns, None)
        made.append(message_object(index, turn.number if turn else None, message))
    return made
