"""Responses that run on another server of the same log: reads their state, and cancels them there."""

from __future__ import annotations

import asyncio
import time

from server.api.responses.response_branch import response_not_found
from server.errors import ApiError
from server.log.response_rows import UNFINISHED, StoredResponse
from server.schemas.items import parse_id
from server.turns.context import ServerContext

CANCEL_SECONDS = 10.0  # that another server may take to hear of it, and to end
LOOK_SECONDS = 0.2  # between two looks at whether it has


async def read_stored_response(
    context: ServerContext, tenant: str, id: str, *, unwanted: bool = False
) -> StoredResponse:
    """The state of a response that does not run on this server: see ``ResponseLog.settle``. Raises a 404."""
    place = parse_id(id, "resp")
    stored = None if place is None else await context.log.responses.settle(tenant, *place, unwanted=unwanted)
    if stored is None:
        raise response_not_found()
    return stored


async def cancel_and_wait(context: ServerContext, tenant: str, id: str) -> StoredResponse:
    """Cancel a response on the server that runs it, which takes until its next heartbeat, and wait for its end. Raises
    a 404, and a 409 if it takes too long.
    """
    until = time.monotonic() + CANCEL_SECONDS
    while (stored := await read_stored_response(context, tenant, id, unwanted=True)).status in UNFINISHED:
        if time.monotonic() > until:
            raise response_elsewhere()
        await asyncio.sleep(LOOK_SECONDS)
    return stored


def response_elsewhere() -> ApiError:
    message = "Another server runs this response: send its session as X-Session-ID, or come back."
    return ApiError(409, message, code="response_elsewhere", headers={"retry-after": "1"})
