"""Writes a response as messages of a WebSocket."""

from __future__ import annotations

from typing import Any

import msgspec

from server.api.responses.objects import ResponseStatus
from server.api.responses.reply import ResponseReply
from server.chat.partial_reply import PartialReply
from server.errors import ApiError
from server.turns.replies import encoder


class SocketReply(ResponseReply):
    """One response on a lane; None is the default lane. ``warms``: nothing was to be generated, so the response is
    complete without output.
    """

    def __init__(self, *args: Any, lane: str | None, warms: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self._lane = lane
        self.has_output = not warms

    def encode_event(self, told: msgspec.Struct) -> bytes:
        return with_lane(encoder.encode(told), self._lane)

    def status_of(self, partial_reply: PartialReply) -> ResponseStatus:
        return super().status_of(partial_reply) if self.has_output else "completed"


def encode_error(error: ApiError, lane: str | None) -> bytes:
    """An error of a request that has no response, in OpenAI's shape for WebSockets."""
    info = msgspec.to_builtins(error.body.error)
    return with_lane(encoder.encode({"type": "error", "status": error.status_code, "error": info}), lane)


def with_lane(encoded: bytes, lane: str | None) -> bytes:
    """A JSON object with its ``stream_id``, unless it belongs to the default lane."""
    return encoded if lane is None else encoded[:-1] + b',"stream_id":"' + lane.encode() + b'"}'
