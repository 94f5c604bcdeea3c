"""The outermost middleware: request ids, access lines, metrics of answers, and uncaught exceptions."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Awaitable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ApiError
from server.http.anthropic_errors import speaks_anthropic
from server.http.error_responses import as_api_error, error_response
from server.telemetry import log_context
from server.telemetry.metrics import Metrics

logger = logging.getLogger("warmturn.http")
CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")


class Access:
    """The outermost ASGI middleware. Adds ``x-request-id`` to every answer (Anthropic's ``request-id`` too) and counts
    it by route and status; sets ``state["started"]``, when the request came, and ``state["request_id"]``. Catches all
    exceptions: before the answer has begun they become a 500 without details, after that the connection is closed
    (streams send their own errors).
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
        log_context.begin(request_id)
        answer = SentResponse(send, request_id, anthropic=speaks_anthropic(scope["path"]))
        try:
            await self.app(scope, receive, answer.send)
        except Exception as error:
            told = log_uncaught(error, request_id)
            if answer.status:
                raise
            await error_response(told, scope)(scope, receive, answer.send)
        finally:
            self.metrics.count_answer(route_of(scope), answer.status)
            log_context.log_access(scope, route_of(scope), answer.status)


class SentResponse:
    """The response to one request, as sent so far; ``status`` is 0 before it has begun."""

    __slots__ = ("_anthropic", "_request_id", "_send", "status")

    def __init__(self, send: Send, request_id: str, *, anthropic: bool) -> None:
        self.status = 0
        self._send = send
        self._request_id = request_id
        self._anthropic = anthropic

    def send(self, message: Message) -> Awaitable[None]:
        """Send a message; the first one gets the request id as a header."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self._request_id
            if self._anthropic:
                headers["request-id"] = self._request_id
        return self._send(message)


class LastResort:
    """ASGI middleware inside the framework's, whose outermost layer would answer uncaught exceptions in its own format:
    here they become a 500 without details.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, sending)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            await error_response(log_uncaught(error, scope["state"]["request_id"]), scope)(scope, receive, send)


def log_uncaught(error: Exception, request_id: str) -> ApiError:
    """Log an uncaught exception. Returns the 500 for the client."""
    told = as_api_error(error)
    if told.status_code == 500:
        logger.exception("request %s failed", request_id, exc_info=error)
    else:  # its client's fault: a line is enough
        logger.warning("request %s failed: %s", request_id, told.detail)
    return told


def request_id_of(scope: Scope) -> str:
    """The client's request id if it is a short, plain string, else a new one."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if CLIENT_ID.match(given) else uuid.uuid4().hex


def route_of(scope: Scope) -> str:
    """The path template of the matched route, not the path: metric labels must not grow with what clients send."""
    return str(getattr(scope.get("route"), "path", "unmatched"))
