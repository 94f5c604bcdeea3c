"""Background responses: they run without a connection, and any request of their tenant can follow them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from starlette.requests import Request

from server.api.responses.reply import ResponseReply, events_of
from server.errors import ApiError
from server.http.error_responses import as_api_error
from server.log.database import LogUnavailable
from server.log.identity import Session
from server.log.response_rows import UNFINISHED
from server.log.session_log import SessionLog
from server.log.timeline import SessionMoved, UnknownSession
from server.schemas.items import parse_id
from server.turns.choices import Choices
from server.turns.turn_runner import TurnRunner

logger = logging.getLogger("warmturn.http")

MOST = 64  # responses in the background at once
CANCEL_SECONDS = 10.0  # for one that is cancelled to be committed
FULL_RETRY = 5  # seconds, told to who comes when there are so many

Id = tuple[str, str]  # tenant, response


class RunningResponse:
    """A background response. ``reply`` has its state so far and the recording of its events."""

    def __init__(self, reply: ResponseReply, choices: Choices) -> None:
        self.reply = reply
        self._choices = choices
        self.cancelled = False  # how it ends otherwise is no failure then
        self.ends = False  # how it ended is being written: that is not to be cut short
        self.task: asyncio.Task[None] | None = None
        self.released = asyncio.Event()  # it is over, and its session is free

    async def cancel(self) -> None:
        """End the response and wait for that: what it has generated is committed. If its reply is complete already, it
        completes.
        """
        assert self.task is not None
        self.cancelled = True
        self._choices.stop()
        await asyncio.wait((self.task,), timeout=CANCEL_SECONDS)
        if not self.ends:  # the engine or the log hangs
            self.task.cancel()
        await asyncio.wait((self.task,))


class BackgroundResponses:
    """The background responses that run on this server. A response is removed after its end has been written to the
    log.
    """

    def __init__(self, log: SessionLog) -> None:
        self._log = log
        self._running: dict[Id, RunningResponse] = {}
        self._slots = 0
        self._cancelling: set[asyncio.Task[None]] = set()

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Reserve room for one more response. Raises a 429."""
        if self._slots >= MOST:
            headers = {"retry-after": str(FULL_RETRY)}
            message = f"{MOST} responses are running in the background: more are not taken now."
            raise ApiError(429, message, code="too_many_background_responses", headers=headers)
        self._slots += 1
        try:
            yield
        finally:
            self._slots -= 1

    def get(self, tenant: str, response: str) -> RunningResponse | None:
        """A response that runs here; None for any other."""
        return self._running.get((tenant, response))

    def start(
        self, session: Session, reply: ResponseReply, runner: TurnRunner, choices: Choices, held: ExitStack
    ) -> None:
        """Run a response whose turn was submitted. ``held`` is closed when it ends."""
        id = session.tenant, reply.head.id
        running = self._running[id] = RunningResponse(reply, choices)
        kept = held.pop_all()
        kept.callback(self._running.pop, id)
        running.task = asyncio.create_task(self._run(session, running, runner, choices))
        running.task.add_done_callback(lambda _: kept.close())
        running.task.add_done_callback(lambda _: running.released.set())

    def cancel_unwanted(self, tenant: str, session: str, key: str) -> None:
        """Cancel a response, as a client of another server has asked."""
        all_ = self._running.items()
        found = [one for (owner, id), one in all_ if owner == tenant and parse_id(id, "resp") == (session, key)]
        ending = found[0].cancel() if found else self._lost(tenant, session, key)
        self._cancelling.add(task := asyncio.create_task(ending))
        task.add_done_callback(self._cancelling.discard)

    async def close(self) -> None:
        """End the running responses. They are marked as failed when the log is opened again."""
        tasks = [running.task for running in self._running.values() if running.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, session: Session, running: RunningResponse, runner: TurnRunner, choices: Choices) -> None:
        reply = running.reply
        assert reply.recording is not None
        try:
            await choices.wait_until_admitted()
            async for _ in runner.events(choices):
                pass  # the reply records them
        except asyncio.CancelledError:
            if not running.cancelled:
                raise
            await self._settle(session, running, reply.cancel)
        except Exception as error:
            told = as_api_error(error)
            if told.status_code == 500:
                logger.exception("a background response failed", exc_info=error)
            await self._settle(
                session, running, reply.cancel if running.cancelled else lambda: reply.encode_failure(told)
            )
        finally:
            choices.close()
            reply.recording.end()

    async def _lost(self, tenant: str, session: str, key: str) -> None:
        """Tell of one that is not running (any more)."""
        with suppress(LogUnavailable):
            await self._log.responses.settle(tenant, session, key)

    async def _settle(self, session: Session, running: RunningResponse, end: Callable[[], object]) -> None:
        """Write how it ended, unless its turn was committed after all. Who follows its events hears the last one."""
        running.ends = True
        reply, recording = running.reply, running.reply.recording
        assert recording is not None
        key, there = reply.to_stored().key, None
        with suppress(LogUnavailable, UnknownSession, SessionMoved):  # whoever looks for it next tells that it failed
            there = await self._log.responses.get(session.tenant, session.name, key)
        if there is not None and there.status not in UNFINISHED:
            recording.add(b"".join(events_of(there, recording.count)))
            return
        end()
        if there is not None:  # else it was deleted
            with suppress(LogUnavailable, UnknownSession, SessionMoved):
                await self._log.responses.put(session.tenant, session.name, reply.to_stored(recording.whole()))


def background_of(request: Request) -> BackgroundResponses:
    background: BackgroundResponses = request.app.state.background
    return background
