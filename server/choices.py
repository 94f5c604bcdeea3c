"""The turns of one request, one per choice, read as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from scheduler.messages import Delta, FinishReason, Receipt, Submit
from server.account import Account
from server.engine import Engine, TurnStream
from server.errors import ApiError


class Choices:
    """Submits turns and merges what they tell.

    After ``close`` no turn of this request is running or queued, and no task of it is left. What one reader does
    not take waits in the turns themselves, merged, not here: the queue is as short as there are choices.
    """

    def __init__(self, engine: Engine, account: Account, submits: Sequence[Submit]) -> None:
        """Hand every turn to the engine at once. Raises EngineUnavailable; then none is left behind. ``account`` has a
        watch for each of them, and is closed with them."""
        self.receipts: list[Receipt | None] = [None] * len(submits)
        self.prefills: list[float | None] = [None] * len(submits)  # seconds from admission to the first token
        self.account = account
        self._engine = engine
        self._news: asyncio.Queue[tuple[int, Delta] | Exception] = asyncio.Queue(len(submits))
        self._open = asyncio.Event()  # set by the first admission or the first failure
        self._failure: Exception | None = None
        self._streams: list[TurnStream] = []
        self._pumps: list[asyncio.Task[None]] = []
        try:
            for submit in submits:
                self._streams.append(engine.submit(submit))
        except Exception as error:
            account.failed(error)
            self.close()
            raise
        self._pumps = [asyncio.create_task(self._pump(i, stream)) for i, stream in enumerate(self._streams)]

    async def opened(self) -> None:
        """Wait until one turn is admitted, and so the request's status is known. Raises what refused it."""
        await self._open.wait()
        if self._failure is not None:
            self.close()
            raise self._failure

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Every delta with the number of its choice, until all choices have ended.

        Raises what ended a turn early: TurnRefused, EngineDied, or ApiError when it failed or was cancelled.
        """
        running = len(self._streams)
        while running:
            news = await self._news.get()
            if isinstance(news, Exception):
                raise news
            yield news
            running -= news[1].finish_reason is not None

    def close(self) -> None:
        """Cancel what still runs. Idempotent."""
        for pump in self._pumps:
            pump.cancel()
        for stream in self._streams:
            stream.cancel()
        self.account.close()
        self.account.metrics.engine(self._engine.stats, self._engine.healthy)

    async def _pump(self, index: int, stream: TurnStream) -> None:
        watch = self.account.watches[index]
        try:
            receipt = self.receipts[index] = await stream.admitted()
            if receipt is not None:
                watch.admitted(receipt)
                self._open.set()
            async for delta in stream:
                watch.saw(delta)
                self.prefills[index] = watch.prefill
                check_end(delta)
                await self._news.put((index, delta))
        except Exception as error:
            self.account.failed(error)
            self._failure = self._failure or error
            self._open.set()
            await self._news.put(error)


def check_end(delta: Delta) -> None:
    """A turn that failed or was ended by others has no finish reason that OpenAI knows. Only a deletion ends turns that
    somebody reads: an engine that stops has failed them before."""
    if delta.finish_reason == FinishReason.ERROR:
        raise ApiError(500, "The engine failed on this request.", code="engine_error")
    if delta.finish_reason == FinishReason.CANCELLED:
        raise ApiError(404, "This turn was ended, as its session was deleted.", code="session_deleted")
