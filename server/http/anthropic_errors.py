"""Anthropic's error body, and the paths whose errors use it."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

ROUTES = "/v1/messages"  # and below: where errors are Anthropic's
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorDetails(msgspec.Struct, frozen=True):
    """What a client program may act upon."""

    error_code: str


class AnthropicErrorInfo(msgspec.Struct, frozen=True):
    """The inside of an error."""

    type: str
    message: str
    details: AnthropicErrorDetails | UnsetType = UNSET


class AnthropicErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """An error, also as the last event of a stream that failed."""

    error: AnthropicErrorInfo
    request_id: str | None = None


def speaks_anthropic(path: str) -> bool:
    """Whether the answers at a path are Anthropic's."""
    return path == ROUTES or path.startswith(ROUTES + "/")


def error_body(status: int, message: str, request_id: str | None, param: str | None = None) -> AnthropicErrorBody:
    """An answer of that status; ``param`` is the field at fault, if there is one. A refused ``thread`` has the code on
    which Anthropic's client sends the whole conversation instead."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = AnthropicErrorDetails("thread_unsupported_request") if param == "thread" else UNSET
    return AnthropicErrorBody(AnthropicErrorInfo(kind, message, details), request_id)
