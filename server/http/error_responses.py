"""Converts exceptions to error responses.

Exceptions of the framework, the engine and the log become ApiErrors here, and are sent in OpenAI's format, or in
Anthropic's or Ollama's on paths of their APIs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from server.chat.chat_tokenizer import TemplateRefused
from server.engine.engine import EngineDied, EngineUnavailable, TurnRefused
from server.errors import ApiError, ClientLeft, bad_request, dotted_path, unavailable
from server.http.anthropic_errors import error_body, speaks_anthropic
from server.http.ollama_errors import OllamaError, speaks_ollama
from server.log.claims import SessionBusy
from server.log.database import LogFull, LogUnavailable, SessionDamaged
from server.log.timeline import SessionExists, SessionMoved, UnknownSession
from server.workers import NoWorkerFree, WorkTimedOut

REFUSALS = {
    "queue_full": 429,
    "session_busy": 409,
    "context_length_exceeded": 400,
    "invalid_prompt": 400,
    "model_not_found": 404,
    "unknown_media": 503,
    "engine_error": 500,
}
STORAGE_RETRY = 10  # seconds, told to a client whose turn or change could not be stored
SENTENCES = {
    404: "There is nothing at this URL.",
    405: "This URL does not take this method.",
}


def as_api_error(error: BaseException) -> ApiError:
    """Any exception as an ApiError; unknown ones become a 500 without details."""
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return validation_error(error)
        case TurnRefused():
            return turn_refused_error(error)
        case EngineUnavailable():
            return unavailable(error.message, error.retry_after)
        case EngineDied():
            return unavailable(error.message, 1, "engine_died")
        case SessionBusy():
            return turn_refused_error(TurnRefused("session_busy", "Another turn of this session is running."))
        case SessionMoved():
            message = "Another server has changed or taken over this session meanwhile; nothing of this was kept."
            return turn_refused_error(TurnRefused("session_busy", message))
        case SessionExists():
            return ApiError(409, "A session with this id exists already.", param="id", code="session_exists")
        case UnknownSession():
            return ApiError(404, "There is no session with this id.", code="session_not_found")
        case LogFull():
            message = "The server's disk is full, so this could not be stored."
            return ApiError(507, message, code="insufficient_storage", headers={"retry-after": str(STORAGE_RETRY)})
        case SessionDamaged():
            message = (
                "Parts of this session's log are damaged, so it cannot be read. Delete the session to use its id again."
            )
            return ApiError(410, message, code="session_damaged")
        case LogUnavailable():
            return unavailable("The session log is not available now.", 5, "log_unavailable")
        case WorkTimedOut():
            return bad_request("This takes the server too long to read.", code="invalid_prompt")
        case NoWorkerFree():
            return unavailable("The server is busy reading other requests.", 2, "overloaded")
        case TemplateRefused():
            return bad_request(error.message, "messages", "invalid_prompt")
        case HTTPException():
            message = SENTENCES.get(error.status_code, "The request was not understood.")
            return ApiError(error.status_code, message, headers=error.headers)
        case UnicodeEncodeError(reason="surrogates not allowed"):  # in a text that was read twice
            return bad_request(
                "The request contains half of a surrogate pair, which is not valid text.", code="invalid_value"
            )
        case _:
            return ApiError(500, "The server failed on this request.")


def turn_refused_error(error: TurnRefused) -> ApiError:
    """The error for a turn that the engine did not admit."""
    status = REFUSALS.get(error.code, 400)
    headers = {}
    if status in (409, 429) or error.retry_after is not None:
        headers["retry-after"] = str(max(1, error.retry_after or 1))
    return ApiError(status, error.message, code=error.code, headers=headers)


async def on_error(request: Request, error: Exception) -> Response:
    """The exception handler of the app."""
    if isinstance(error, ClientLeft):
        return Response(status_code=499)  # nobody reads it; the access log and the metrics do
    return error_response(as_api_error(error), request.scope)


def error_response(error: ApiError, scope: Scope) -> Response:
    """The error as a response, in the format of the request's API."""
    data = error.encode()
    if speaks_anthropic(scope["path"]):
        request_id = scope.get("state", {}).get("request_id")
        data = msgspec.json.encode(error_body(error.status_code, error.detail, request_id, error.body.error.param))
    elif speaks_ollama(scope["path"]):
        data = msgspec.json.encode(OllamaError(error.detail))
    return Response(data, error.status_code, error.headers, "application/json")


ANSWERED = (
    HTTPException,
    RequestValidationError,
    TurnRefused,
    EngineUnavailable,
    EngineDied,
    SessionBusy,
    SessionMoved,
    SessionExists,
    UnknownSession,
    LogUnavailable,
    WorkTimedOut,
    NoWorkerFree,
    TemplateRefused,
    ClientLeft,
)


def install(app: FastAPI) -> None:
    """Register ``on_error`` for every known exception; ``server.middleware.access`` catches the rest."""
    for kind in ANSWERED:
        app.add_exception_handler(kind, on_error)


# --- pydantic's findings ------------------------------------------------------------------------------------

CODES = {
    "missing": "missing_required_parameter",
    "unknown": "unknown_parameter",
    "unsupported": "unsupported_parameter",
}
LENGTHS = {
    "too_short": "must have {min_length} or more entries",
    "too_long": "can have {max_length} entries or fewer",
}
FORMS = {  # patterns, by what they say
    r"^[a-zA-Z0-9_-]{1,128}$": "must be 1 to 128 letters of a to z and A to Z, digits, underscores and hyphens",
    r"^[a-zA-Z0-9_-]{1,64}$": "must be 1 to 64 letters of a to z and A to Z, digits, underscores and hyphens",
    r"^[^\s<|\\/>]{1,64}$": "must be 1 to 64 characters, and no space, <, >, |, / or \\",
    r"^[A-Za-z0-9._:@-]{0,128}$": "can have at most 128 letters of a to z and A to Z, digits and . _ : @ -",
    r"^[0-9a-f]{0,64}$": "can have at most 64 hexadecimal digits, small ones",
    r"^\d{4}-\d{2}-\d{2}$": "must be a day, as 2026-11-25",
}
SUBJECT = re.compile(r"^(?:Input|String|Value|List|Dictionary) ")  # pydantic's, in whose place ours stands
SHAPES = {  # unions, where pydantic would speak of each branch
    "prompt": "must be a string, a list of strings, a list of token ids or a list of lists of token ids",
    "stop": "must be a string or a list of strings",
}


def validation_error(error: RequestValidationError) -> ApiError:
    """The first error as a 400. Pydantic's ``input`` and ``ctx`` are left out, as they contain what the client sent."""
    finding = error.errors()[0]
    kind: str = finding["type"]
    path: list[str | int] = [*finding["loc"][1:]]  # without "body"
    field = finding.get("ctx", {}).get("field")  # set by the checks of server.schemas that see a whole object
    if isinstance(field, str):
        path.append(field)
    elif path and path[0] in SHAPES and kind not in ("missing", "value_error"):
        path = path[:1]
    param = dotted_path(path)
    where = "parameter of the URL" if finding["loc"][0] == "query" else "field of the body"
    subject = param or (f"A {where}" if path else "The body")  # a name that is not ours is not repeated
    return bad_request(f"{subject} {describe_finding(finding, path)}.", param, CODES.get(kind, "invalid_value"))


def describe_finding(finding: Mapping[str, Any], path: list[str | int]) -> str:
    """What is wrong, as the end of a sentence that begins with the parameter's name."""
    kind: str = finding["type"]
    if kind == "missing":
        return "is required"
    if kind == "unknown":
        return "is not a parameter of this endpoint"
    if kind == "value_error" or kind in CODES:
        return str(finding["msg"]).removeprefix("Value error, ").rstrip(".")
    if path and path[0] in SHAPES:
        return SHAPES[str(path[0])]
    if kind in ("model_type", "dict_type"):
        return "should be an object"
    if kind in LENGTHS:
        return LENGTHS[kind].format(**finding["ctx"])
    if kind == "string_pattern_mismatch":
        return FORMS.get(finding["ctx"]["pattern"], "does not have the form that it must have")
    said = SUBJECT.sub("", str(finding["msg"]))
    return said[0].lower() + said[1:]
