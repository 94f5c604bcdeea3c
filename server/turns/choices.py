"""``Choices``: the turns of one request, one per choice, read as one stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec

from scheduler.protocol import Delta, FinishReason, Submit
from scheduler.turn_receipt import Receipt
from server.engine.engine import Engine, TurnStream
from server.engine.news import News
from server.errors import ApiError
from server.turns.request_usage import RequestUsage


class Choices:
    """Submits the turns of a request and merges their deltas. After ``close``, none of them is running or queued.
    Deltas that the reader has not taken are merged in the turns' mailboxes.
    """

    def __init__(self, engine: Engine, usage: RequestUsage, submits: Sequence[Submit], patience: int = 1) -> None:
        """Submit every turn at once. Raises EngineUnavailable; then none is left. ``usage`` has a stopwatch for each
        turn, and is closed with them. ``patience``: how many deltas to collect before the reader is woken.
        """
        self.usage = usage
        self._engine = engine
        self._news = News()  # of all turns
        self._taken: list[tuple[int, Delta]] = []
        self._failure: Exception | None = None
        self._streams: list[TurnStream] = []
        try:
            for submit, watch in zip(submits, usage.watches, strict=True):
                stream = engine.submit(submit)
                stream.news, stream.heard, stream.patience = self._news, watch.saw, patience
                self._streams.append(stream)
        except Exception as error:
            usage.record_failure(error)
            self.close()
            raise
        self._news.set()  # one may be refused already

    @property
    def receipts(self) -> list[Receipt | None]:
        return [stream.receipt for stream in self._streams]

    async def wait_until_admitted(self) -> None:
        """Wait until one turn is admitted, which decides the response's status. Raises the refusal."""
        while self._failure is None and not any(self.receipts):
            await self._collect()
        if self._failure is not None:
            self.close()
            raise self._failure

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Every delta with the number of its choice, until all choices have ended. Raises TurnRefused or EngineDied, or
        ApiError if a turn failed or was cancelled.
        """
        running = len(self._streams)
        while running:
            taken, self._taken = self._taken, []
            for index, delta in taken:
                yield index, delta
                running -= delta.finish_reason is not None
            if not taken:
                if self._failure is not None:
                    raise self._failure
                await self._collect()

    def stop(self) -> None:
        """End the running turns and keep what they have generated."""
        for stream in self._streams:
            stream.stop()

    def close(self) -> None:
        """Cancel what still runs. Idempotent."""
        for stream in self._streams:
            stream.cancel()
        self.usage.close()
        self.usage.metrics.engine(self._engine.stats, self._engine.healthy)

    async def _collect(self) -> None:
        """Wait for news, and take a piece of each turn's; the first failure is kept."""
        await self._news.wait()
        self._news.clear()
        for index, stream in enumerate(self._streams):
            try:
                if (delta := stream.take()) is not None:  # what ended it early comes behind the last one
                    early = explain_early_end(delta, stream)
                    shown = delta if early is None else msgspec.structs.replace(delta, finish_reason=None)
                    self._taken.append((index, shown))
                    if early is not None:
                        raise early
            except Exception as error:
                self.usage.record_failure(error)
                self._failure = self._failure or error


def explain_early_end(delta: Delta, stream: TurnStream) -> ApiError | None:
    """The error for a turn that ended without a reply: it failed, its session was deleted (an engine that stops fails
    its turns before), or it was stopped before its first token. None if it has a reply.
    """
    if delta.finish_reason == FinishReason.ERROR:
        return ApiError(500, "The engine failed on this request.", code="engine_error")
    if delta.finish_reason == FinishReason.CANCELLED and stream.stopped:
        return None if stream.spoke else turn_cancelled()
    if delta.finish_reason == FinishReason.CANCELLED:
        return ApiError(404, "The turn was ended because its session was deleted.", code="session_deleted")
    return None


def turn_cancelled() -> ApiError:
    """499: the turn was cancelled. Clients do not retry this status."""
    message = "This turn was cancelled before its first token; nothing of it is kept."
    return ApiError(499, message, code="turn_cancelled")
