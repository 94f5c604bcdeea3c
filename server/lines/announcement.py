"""A client that opens a connection under its conversation's id is about to go on with it."""

from __future__ import annotations

import logging

from fastapi.requests import HTTPConnection

from scheduler.protocol import Warm
from server.lines.hints import hint_of
from server.log.database import LogUnavailable
from server.turns.context import context_of

logger = logging.getLogger("warmturn.lines")


async def announce_line(connection: HTTPConnection) -> None:
    """Have the KV of the newest line that the connection's headers name brought to the device, if there is one. A log
    that cannot be read is no reason to refuse the connection.
    """
    context, hint, tenant = context_of(connection), hint_of(connection.headers, {}), connection.state.tenant
    if hint is None or not context.line_seconds:
        return
    try:
        lines = await context.log.find_by_names(tenant, hint.names)
    except LogUnavailable as error:
        logger.warning("a connection's conversation is not announced: %s", error)
        return
    if lines:
        context.engine.warm(Warm(tenant, lines[0].id))
