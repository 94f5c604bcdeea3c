"""``PoolingCalls``: requests for embeddings and scores that the engine has and whose answer has not come."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence

from scheduler.pooling_messages import Pool, Pooled, PoolInput
from server.engine.engine import TurnRefused

RETRY = 1  # seconds, told to a client that finds the queue full


class PoolingCalls:
    """``len``: how many there are."""

    def __init__(self, cancel: Callable[[str], None]) -> None:
        """``cancel`` takes a request out of the engine's queue."""
        self._cancel = cancel
        self._open = 0

    def __len__(self) -> int:
        return self._open

    async def ask(
        self, tenant: str, inputs: Sequence[PoolInput], spare: bool, send: Callable[[Pool], Awaitable[Pooled]]
    ) -> Pooled:
        """The engine's answer to what ``send`` sends. Raises TurnRefused, and what ``send`` raises."""
        question = Pool(uuid.uuid4().hex, tenant, tuple(inputs), spare)
        self._open += 1
        try:
            answer = await send(question)
        except asyncio.CancelledError:
            self._cancel(question.request)
            raise
        finally:
            self._open -= 1
        if answer.code:
            raise TurnRefused(answer.code, answer.error, RETRY if answer.code == "queue_full" else None)
        return answer
