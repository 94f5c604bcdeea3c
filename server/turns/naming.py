"""The session that a request names. ``X-Session-ID`` alone names one only if it was made here: clients use that header
for ids of their own too, which are hints at most (``server.lines.hints``).
"""

from __future__ import annotations

from starlette.requests import Request

from server.log.identity import HEADER, SESSION_ID, Session, one_name, stated_session
from server.turns.context import context_of


async def named_session(request: Request, body_id: str | None) -> Session | None:
    """The session that the body names, or the header: one that the tenant has or that a turn of this process is about
    to begin, or that the client opts in to. None if none does. Raises a 400 if they differ, and LogUnavailable.
    """
    if (stated := stated_session(request, body_id)) is not None:
        return stated
    tenant, made = request.state.tenant, set()
    for given in {*request.headers.getlist(HEADER)}:
        if SESSION_ID.match(given):
            log = context_of(request).log
            if log.is_held(tenant, given) or await log.summary(tenant, given) is not None:
                made.add(given)
    return Session(tenant, one_name(made), stateful=False) if made else None
