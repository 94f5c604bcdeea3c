"""The answer to a request for a stream whose model has to be loaded first: comments tell how far that is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server.errors import ApiError, ClientLeft
from server.http.anthropic_errors import speaks_anthropic
from server.http.error_responses import as_api_error, error_response
from server.http.sse import EVENTS, HEADERS, frame_event

SILENT_SECONDS = 1.0  # for an answer with a status of its own, before the stream begins
PROGRESS_SECONDS = 2.0  # between two comments
STREAMED = "/v1/responses"  # errors in its streams have a shape of their own


async def answer_or_progress(
    answer: Callable[[], Awaitable[Response]], scope: Scope, stage: Callable[[], str]
) -> Response:
    """The response of ``answer`` if it comes at once, else one that has begun: it sends comments with the ``stage`` of
    the load until it comes. Raises what ``answer`` raises at once.
    """
    task = asyncio.ensure_future(answer())
    try:
        done, _ = await asyncio.wait((task,), timeout=SILENT_SECONDS)
    except asyncio.CancelledError:
        task.cancel()
        raise
    return task.result() if done else LoadingStream(task, stage)


class LoadingStream(Response):
    """An event stream whose head is sent before its answer is known. An error becomes its last event."""

    def __init__(self, task: asyncio.Future[Response], stage: Callable[[], str]) -> None:
        self.status_code = 200
        self.media_type = EVENTS
        self.background = None
        self._task = task
        self._stage = stage
        self.init_headers(HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            response = await self._response(scope, send)
        except ClientLeft:
            return
        except OSError:
            self._task.cancel()
            return
        if response is not None:
            await response(scope, receive, Headless(send).send)

    async def _response(self, scope: Scope, send: Send) -> Response | None:
        """The answer; None after an error, which was sent."""
        try:
            while not (await asyncio.wait((self._task,), timeout=PROGRESS_SECONDS))[0]:
                await send(body(f": loading: {self._stage()}\n\n".encode(), more=True))
            return self._task.result()
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        except (ClientLeft, OSError):
            raise
        except Exception as error:
            await send(body(failure_event(as_api_error(error), scope), more=False))
            return None


class Headless:
    """Sends what follows the head of a response. Of one that is no stream the body becomes an event."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._streams = True
        self._whole = b""

    async def send(self, message: Message) -> None:
        """Send one message of the response."""
        if message["type"] == "http.response.start":
            self._streams = any(
                name == b"content-type" and value.startswith(EVENTS.encode()) for name, value in message["headers"]
            )
        elif self._streams:
            await self._send(message)
        else:
            self._whole += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send(body(frame_event(self._whole), more=False))


def body(data: bytes, *, more: bool) -> MutableMapping[str, Any]:
    """A message of a response's body."""
    return {"type": "http.response.body", "body": data, "more_body": more}


def failure_event(error: ApiError, scope: Scope) -> bytes:
    """The error as the last event of a stream, in the shape of the request's API."""
    path, info = scope["path"], error.body.error
    if path.startswith(STREAMED):
        told = {"type": "error", "code": info.code, "message": info.message, "param": info.param, "sequence_number": 0}
        return b"event: error\n" + frame_event(msgspec.json.encode(told))
    event = frame_event(bytes(error_response(error, scope).body))
    return b"event: error\n" + event if speaks_anthropic(path) else event
