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
    """Details of an error for client programs."""

    error_code: str


class AnthropicErrorInfo(msgspec.Struct, frozen=True):
    """The field ``error`` of an error body."""

    type: str
    message: str
    details: AnthropicErrorDetails | UnsetType = UNSET


class AnthropicErrorBody(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """Anthropic's error body, also the last event of a stream that failed."""

    error: AnthropicErrorInfo
    request_id: str | None = None


def speaks_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == ROUTES or path.startswith(ROUTES + "/")


def error_body(status: int, message: str, request_id: str | None, param: str | None = None) -> AnthropicErrorBody:
    """An error body for a status; ``param`` is the field at fault, if any. A refused ``thread`` gets the code that
    makes Anthropic's client send the whole conversation instead.
    """
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = AnthropicErrorDetails("thread_unsupported_request") if param == "thread" else UNSET
    return AnthropicErrorBody(AnthropicErrorInfo(kind, message, details), request_id)
