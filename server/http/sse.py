"""Server-sent events, and work that is cancelled when its client disconnects."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import ApiError, ClientLeft
from server.http.error_responses import as_api_error

T = TypeVar("T")
logger = logging.getLogger("warmturn.http")

PING_SECONDS = 15.0
PING = b": ping\n\n"
EVENTS = "text/event-stream"
DONE = b"data: [DONE]\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def frame_event(data: bytes) -> bytes:
    """One event. JSON contains no raw line ends, so it fits in one data line."""
    return b"data: " + data + b"\n\n"


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class DisconnectWatch:
    """Cancels a task when its client disconnects, and sets ``gone``. After ``over`` is set, nothing is cancelled."""

    __slots__ = ("gone", "over", "task")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.gone = False
        self.over = False

    async def look(self, receive: Receive) -> None:
        """Wait until the client disconnects."""
        await wait_for_disconnect(receive)
        if not self.over:
            self.gone = True
            self.task.cancel()


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of ``work``. If the client disconnects first, ``work`` is cancelled, and ClientLeft is raised after
    its cleanup. ``work`` runs in the caller's task; only the watcher runs in another one.
    """
    own = asyncio.current_task()
    assert own is not None
    watch = DisconnectWatch(own)
    watcher = asyncio.create_task(watch.look(receive))
    try:
        result = await work
    except (asyncio.CancelledError, Exception):
        if not watch.gone:
            raise
    finally:
        watch.over = True
        watcher.cancel()
    if watch.gone:
        own.uncancel()
        raise ClientLeft
    return result


class EventStream(Response):
    """A response made of events, with a ``ping`` after 15 silent seconds so that proxies keep the connection (None:
    without).

    ``close`` is called exactly once, however the stream ends. ``done`` follows the last event. An exception while
    streaming becomes one last event instead, by default in OpenAI's error shape.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        close: Callable[[], object],
        headers: Mapping[str, str] | None = None,
        *,
        done: bytes = DONE,
        failed: Callable[[ApiError], bytes] | None = None,
        media_type: str = EVENTS,
        ping: bytes | None = PING,
    ) -> None:
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self._events = events
        self._close = close
        self._done = done
        self._ping_data = ping
        self._failed = failed or (lambda error: frame_event(error.encode()))
        self._turnstile = asyncio.Lock()  # events and pings leave one at a time
        self._last_sent = 0.0
        self.init_headers({**HEADERS, **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientLeft, OSError):  # there is nobody to tell
                await while_connected(receive, self._stream(send))
        finally:
            self._close()
            await self._events.aclose()

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._last_sent = time.monotonic()
        pinging = None if self._ping_data is None else asyncio.create_task(self._ping(send, self._ping_data))
        try:
            async for data in self._events:
                await self._send(send, data)
            last = self._done
        except ClientLeft:
            raise
        except Exception as error:
            told = as_api_error(error)
            if told.status_code == 500:
                logger.exception("a stream failed", exc_info=error)
            last = self._failed(told)
        finally:
            if pinging is not None:
                pinging.cancel()
        await self._send(send, last, more=False)

    async def _send(self, send: Send, data: bytes, more: bool = True) -> None:
        async with self._turnstile:
            try:
                await send({"type": "http.response.body", "body": data, "more_body": more})
            except OSError:
                raise ClientLeft from None
            self._last_sent = time.monotonic()

    async def _ping(self, send: Send, data: bytes) -> None:
        with suppress(ClientLeft):
            while True:
                silent = time.monotonic() - self._last_sent
                if silent >= PING_SECONDS:
                    await self._send(send, data)
                else:
                    await asyncio.sleep(PING_SECONDS - silent)
