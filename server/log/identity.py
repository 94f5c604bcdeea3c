"""The session that a request states, and which ids are valid."""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.requests import Request

from server.errors import bad_request

HEADER = "x-session-id"
CREATE = "x-session-create"  # "true": HEADER may begin a session
SESSION_ID = re.compile(r"[A-Za-z0-9._:@-]{1,128}\Z")
RESERVED = frozenset({"import", ".", ".."})  # /v1/sessions/import; clients take the dots out of a path


@dataclass(frozen=True)
class Session:
    """A session that the client named. ``stateful``: the request has only new messages or text, the log has the
    rest.
    """

    tenant: str
    name: str
    stateful: bool


def check_id(name: str) -> str:
    """``name``, if it is a valid session id. Raises ValueError with the end of a sentence that begins with the id."""
    if not SESSION_ID.match(name):
        raise ValueError("must have 1 to 128 of the characters A-Z a-z 0-9 . _ : @ -")
    if name in RESERVED:
        raise ValueError("cannot be a reserved word")
    return name


def stated_session(request: Request, body_id: str | None, path_id: str | None = None) -> Session | None:
    """The session that the path or the body names, or the header beside ``CREATE``; None if none does. With a path or
    body id the request is stateful. Raises a 400 if another header names another session.
    """
    stateful = path_id is not None or body_id is not None
    headers = request.headers.getlist(HEADER)
    if not stateful and not may_begin(request):
        return None
    if not stateful and not headers:
        raise bad_request("X-Session-Create is for requests with X-Session-ID.", None, "invalid_session_id")
    for given, param in ((path_id, "session_id"), (body_id, "session_id"), *((header, None) for header in headers)):
        if given is not None:
            try:
                check_id(given)
            except ValueError as error:
                raise bad_request(f"A session id {error}.", param, "invalid_session_id") from None
    name = one_name({name for name in (path_id, body_id, *headers) if name is not None})
    return Session(request.state.tenant, name, stateful)


def may_begin(request: Request) -> bool:
    """Whether the client opts in to a session of the header's name. Raises a 400."""
    given = request.headers.get(CREATE, "false").strip().lower()
    if given not in ("true", "false"):
        raise bad_request("X-Session-Create must be true or false.", None, "invalid_session_id")
    return given == "true"


def one_name(names: set[str]) -> str:
    """The one name that a request gives its session. Raises a 400 if there are several."""
    if len(names) > 1:
        message = "The session ids of this request differ: path, session_id and X-Session-ID must agree."
        raise bad_request(message, "session_id", "session_id_mismatch")
    return names.pop()
