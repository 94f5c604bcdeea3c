"""A message that is a compaction and nothing else: nothing is generated behind it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from server.api.anthropic import objects as objects
from server.api.anthropic.reply import anthropic_usage, compaction_events, iteration, named_event
from server.http.json_response import json_response
from server.http.sse import EventStream
from server.schemas.objects import CachedTokens, CompletionTokens, Usage

NOTHING = Usage(0, 0, 0, CachedTokens(0), CompletionTokens(0))


def paused_message(
    id: str,
    model: str,
    block: objects.CompactionBlock,
    summaries: Sequence[Usage],
    edits: objects.AppliedEdits | UnsetType,
) -> objects.Message:
    """The message. Its own usage is nothing; that of the summaries is in ``iterations``."""
    parts = [iteration("compaction", anthropic_usage(summary, 0)) for summary in summaries]
    usage = msgspec.structs.replace(anthropic_usage(NOTHING, 0), iterations=parts)
    return objects.Message(id, model, [block], usage, "compaction", context_management=edits)


def paused_response(message: objects.Message, *, stream: bool) -> Response:
    """The message as one object, or as the events of a stream."""
    if not stream:
        return json_response(message)
    (block,) = message.content
    assert isinstance(block, objects.CompactionBlock)
    begun = msgspec.structs.replace(message, content=[], stop_reason=None, context_management=UNSET)
    end = objects.MessageDelta(objects.End("compaction"), message.usage, context_management=message.context_management)
    events = [objects.MessageStart(begun), *compaction_events(block), end, objects.MessageStop()]
    return EventStream(iterate(events), lambda: None, done=b"")


async def iterate(events: Sequence[msgspec.Struct]) -> AsyncGenerator[bytes]:
    for event in events:
        yield named_event(event)
