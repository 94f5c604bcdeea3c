"""``RunningTurns``: turns of sessions that run without a connection, and that any client of their tenant can follow."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing

from server.errors import ApiError
from server.http.error_responses import as_api_error
from server.http.event_recording import EventRecording
from server.http.sse import EventStream
from server.log.identity import Session
from server.log.logged_message import LoggedMessage

logger = logging.getLogger("warmturn.http")


class RunningTurn:
    """A turn that runs. ``messages`` are those that it adds to the session before its reply, from message number
    ``first`` on. ``recording`` has the events of its stream, the last one included once it has ended. ``admitted`` is
    set when the status of its response is certain; ``refusal`` is what was raised before that.
    """

    def __init__(self, first: int, messages: Sequence[LoggedMessage]) -> None:
        self.first = first
        self.messages = [*messages]
        self.created = int(time.time())
        self.recording = EventRecording()
        self.admitted = asyncio.Event()
        self.refusal: Exception | None = None

    def follow(self, headers: dict[str, str]) -> EventStream:
        """All its events as a stream, also those to come. If the client disconnects, the turn goes on."""
        return EventStream(self.recording.follow(0), lambda: None, headers, done=b"")


class RunningTurns:
    """The turns that run on this server without a connection. A turn is removed when it has ended."""

    def __init__(self) -> None:
        self._turns: dict[tuple[str, str], RunningTurn] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def get(self, tenant: str, session: str) -> RunningTurn | None:
        """The turn of a session; None if none runs here."""
        return self._turns.get((tenant, session))

    def start(
        self,
        session: Session,
        turn: RunningTurn,
        admission: Awaitable[None],
        events: AsyncGenerator[bytes],
        held: ExitStack,
        *,
        done: bytes,
        failed: Callable[[ApiError], bytes],
    ) -> None:
        """Run a turn that was submitted. ``events`` are read once ``admission`` has ended; ``done`` follows the last
        one, or ``failed`` makes the last one of an error. ``held`` is closed when the turn has ended.
        """
        key = session.tenant, session.name
        self._turns[key] = turn
        kept = held.pop_all()

        async def run() -> None:
            try:
                await record(turn, admission, events, done, failed)
            finally:
                kept.close()
                if self._turns.get(key) is turn:  # it has released its session: another may have begun
                    del self._turns[key]
                turn.recording.end()
                turn.admitted.set()

        self._tasks.add(task := asyncio.create_task(run()))
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End the running turns. They are not committed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def record(
    turn: RunningTurn,
    admission: Awaitable[None],
    events: AsyncGenerator[bytes],
    done: bytes,
    failed: Callable[[ApiError], bytes],
) -> None:
    """Record the events of a turn until they end."""
    try:
        async with aclosing(events):
            await admission
            turn.admitted.set()
            async for data in events:
                turn.recording.add(data)
        turn.recording.add(done)
    except Exception as error:
        told = as_api_error(error)
        if not turn.admitted.is_set():
            turn.refusal = error
        elif told.status_code == 500:
            logger.exception("a turn without a connection failed", exc_info=error)
        turn.recording.add(failed(told))
