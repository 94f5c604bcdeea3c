"""Errors as clients see them: status, message, type, parameter and code, in OpenAI's shape.

    HTTPException (starlette)
    +-- ApiError            status, message, type, param and code are ours and safe to show

Messages never repeat what the client sent. ``server.http.error_responses`` makes ApiErrors of all other exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec
from starlette.exceptions import HTTPException

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z")  # of a field, that may be repeated to a client
INVALID = "invalid_request_error"
KINDS = {401: "authentication_error", 429: "rate_limit_error"}  # 4xx otherwise INVALID, 5xx server_error


class ErrorInfo(msgspec.Struct, frozen=True):
    """The inside of OpenAI's error body."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error body, also the last event of a stream that failed."""

    error: ErrorInfo


class ApiError(HTTPException):
    """An answer in OpenAI's error shape. ``param`` names the field at fault, as in ``messages[0].role``. ``kind`` is
    its ``type``; None: that of its status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__(status, detail=message, headers=dict(headers or {}))
        kind = kind or KINDS.get(status, INVALID if status < 500 else "server_error")
        self.body = ErrorBody(ErrorInfo(message, kind, param, code))

    def encode(self) -> bytes:
        return msgspec.json.encode(self.body)


class ClientLeft(Exception):
    """The client closed the connection before its answer was complete."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the parameter at fault."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, retry_after: int, code: str = "engine_unavailable") -> ApiError:
    """A 503 with a Retry-After header, in seconds."""
    return ApiError(503, message, code=code, headers={"retry-after": str(max(1, retry_after))})


def dotted_path(path: Sequence[str | int]) -> str | None:
    """A location as OpenAI writes it: ``messages[0].content``. None if it contains a name that is not a known field."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.startswith("<"):  # the tag of a union's branch
            continue
        elif NAME.match(part):
            text += f".{part}" if text else part
        else:
            return None
    return text or None
