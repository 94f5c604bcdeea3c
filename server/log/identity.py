"""The session that a request names, and which ids are valid."""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.requests import Request

from server.errors import bad_request

HEADER = "x-session-id"
FOREIGN = ("x-session-affinity", "x-parent-session-id")  # with one of these, HEADER holds an id of the client's own
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


def named_session(request: Request, body_id: str | None, path_id: str | None = None) -> Session | None:
    """The session that the path, the body or the header names; None if none does. With a path or body id the request is
    stateful. The header names none where the client uses it for an id of its own, which is a hint at most
    (``server.lines.hints``). Raises a 400 if the header names another session.
    """
    foreign = any(name in request.headers for name in FOREIGN)
    headers = [] if foreign else request.headers.getlist(HEADER)
    header_id = headers[0] if headers else None
    for given, param in ((path_id, "session_id"), (body_id, "session_id"), (header_id, None)):
        if given is not None:
            try:
                check_id(given)
            except ValueError as error:
                raise bad_request(f"A session id {error}.", param, "invalid_session_id") from None
    names = {name for name in (path_id, body_id, *headers) if name is not None}
    if len(names) > 1:
        message = "The session ids of this request differ: path, session_id and X-Session-ID must agree."
        raise bad_request(message, "session_id", "session_id_mismatch")
    if not names:
        return None
    return Session(request.state.tenant, names.pop(), stateful=path_id is not None or body_id is not None)
