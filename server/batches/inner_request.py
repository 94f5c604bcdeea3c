"""Requests that no connection has brought: the lines of batches, which go through the app as others do."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Scope

from server.http.error_responses import as_api_error
from server.log.quota import begin_quota
from server.middleware.auth import KeyAccess
from server.telemetry import log_context

logger = logging.getLogger("warmturn.http")


class InnerAnswer(NamedTuple):
    """An answer; ``retry_after`` in seconds, as its header says, None: it has none."""

    status: int
    body: bytes
    request_id: str
    retry_after: float | None = None


async def ask(
    root: ASGIApp, app: ASGIApp, path: str, body: bytes, access: KeyAccess, headers: Mapping[str, str]
) -> InnerAnswer:
    """POST a JSON body as a key's, on spare steps only; ``root`` is the framework's app around ``app``. It is not bound
    to a connection: its caller's cancellation ends it. To be called in a task of its own, as it sets context variables.
    """
    request_id = uuid.uuid4().hex
    log_context.begin(request_id)
    begin_quota(access.quota)
    scope = scope_of(root, path, {"content-type": "application/json", "content-length": str(len(body)), **headers})
    scope["state"] = {
        "tenant": access.tenant,
        "key": access.key,
        "rate_limit": access.limit,
        "models": access.models,
        "request_id": request_id,
        "started": time.perf_counter(),
        "spare": True,
    }
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    answered: list[Message] = []

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # nobody leaves
        raise AssertionError

    async def send(message: Message) -> None:
        answered.append(message)

    try:
        await app(scope, receive, send)
    except Exception as error:
        told = as_api_error(error)
        if told.status_code == 500:
            logger.exception("a request of a batch failed", exc_info=error)
        return InnerAnswer(told.status_code, told.encode(), request_id, retry_of(told.headers))
    start = next(message for message in answered if message["type"] == "http.response.start")
    told_headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in start["headers"]}
    data = b"".join(message.get("body", b"") for message in answered if message["type"] == "http.response.body")
    return InnerAnswer(start["status"], data, request_id, retry_of(told_headers))


def scope_of(root: ASGIApp, path: str, headers: Mapping[str, str]) -> Scope:
    """ASGI's description of a POST without a connection."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": None,
        "server": None,
        "app": root,
    }


def retry_of(headers: Mapping[str, str] | None) -> float | None:
    """The seconds of a Retry-After header; None if it has none."""
    given = (headers or {}).get("retry-after", "")
    return float(given) if given.isdecimal() else None
