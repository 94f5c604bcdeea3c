"""The outermost layer: request ids, the count of every answer, and the last resort for exceptions."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server import logs
from server.anthropic_objects import speaks_anthropic
from server.errors import as_api_error, error_response
from server.metrics import Metrics

logger = logging.getLogger("warmturn.http")
CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")


class Access:
    """ASGI middleware: every answer carries ``x-request-id`` (Anthropic's ``request-id`` too) and is counted by route
    and status; ``state["started"]`` is when its request came, ``state["request_id"]`` its id.

    Nothing that is raised below gets past it: before the answer has begun it becomes a bare 500, after that the
    connection is closed (streams tell their errors themselves).
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = request_id_of(scope)
        scope.setdefault("state", {}).update(started=time.perf_counter(), request_id=request_id)
        logs.begin(request_id)
        status = 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if speaks_anthropic(scope["path"]):
                    headers["request-id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, sending)
        except Exception as error:
            told = as_api_error(error)
            if told.status_code == 500:
                logger.exception("request %s failed", request_id)
            else:  # its client's fault: a line is enough
                logger.warning("request %s failed: %s", request_id, told.detail)
            if status:
                raise
            await error_response(told, scope)(scope, receive, sending)
        finally:
            self.metrics.answered(route_of(scope), status)
            logs.answered(scope, route_of(scope), status)


def request_id_of(scope: Scope) -> str:
    """The client's id when it is harmless text, else a new one."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if CLIENT_ID.match(given) else uuid.uuid4().hex


def route_of(scope: Scope) -> str:
    """The matched route's template, never the path itself: a label must not grow with what clients send."""
    return str(getattr(scope.get("route"), "path", "unmatched"))
