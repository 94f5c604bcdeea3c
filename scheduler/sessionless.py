"""What engines share that keep no sessions: their socket to the server, and the answers to what concerns turns and
sessions.
"""

from __future__ import annotations

from typing import Protocol

from scheduler.adapter_messages import AdapterLoaded, LoadAdapter
from scheduler.pooling_messages import Pool, Pooled
from scheduler.protocol import (
    Expand,
    Expanded,
    ExpandedMedium,
    Export,
    Exported,
    Forget,
    Forgotten,
    FromEngine,
    Import,
    Imported,
    Inspect,
    Inspected,
    Refused,
    Submit,
    ToEngine,
)
from scheduler.speech_messages import Transcribe, Transcribed

HEARTBEAT = 1.0  # seconds


class MessageChannel(Protocol):
    """The socket to the server."""

    def send(self, message: FromEngine) -> None: ...

    def receive(self, wait_ms: int) -> list[ToEngine]: ...


def answer_without_sessions(message: ToEngine, reason: str) -> FromEngine | None:
    """The answer to a message that this engine is not for: ``reason`` is a sentence for people. None where none is
    waited for.
    """
    match message:
        case Submit():
            return Refused(message.turn, "invalid_prompt", reason)
        case Forget():
            return Forgotten(message.tenant, message.session, message.life)
        case Inspect():
            return Inspected(message.request, {})
        case Export():
            return Exported(message.request, 0, 0)
        case Import():
            return Imported(message.request, 0, "this model keeps no KV")
        case Expand():
            return Expanded(message.request, tuple(ExpandedMedium(m.digest, "", b"", reason) for m in message.media))
        case LoadAdapter():
            return AdapterLoaded(message.request, error="this model takes no adapters")
        case Pool():
            return Pooled(message.request, code="invalid_prompt", error=reason)
        case Transcribe():
            return Transcribed(message.request, error=reason)
        case _:  # announcements of turns
            return None
