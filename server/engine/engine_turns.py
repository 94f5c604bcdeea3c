"""``EngineTurns``: the turns that were sent to the engine process, and the requests that are still being read."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Callable, Sequence

from scheduler.protocol import QUEUE_FULL, Delta, FinishReason, Refused, Submit
from server.engine.engine import EngineDied, TurnRefused
from server.engine.mailbox import Mailbox
from server.engine.waiting import REQUEST, RequestReading, WaitingTurns


class EngineTurns:
    """Turns that were sent to the living engine process and have not ended, each with its mailbox.
    A turn is removed when its last delta comes, when the engine refuses it, or when the engine dies. ``len``: the
    number of turns.
    """

    def __init__(self, max_queued: int, cancel: Callable[[str], object]) -> None:
        """``max_queued``: capacity of the engine's queue; ``cancel`` is called with the id of a turn that has not
        ended, to cancel it in the engine.
        """
        self._max_queued = max_queued
        self._send_cancel = cancel
        self._turns: dict[str, Mailbox] = {}
        self._waiting = WaitingTurns(max_queued)
        self._requests = itertools.count()
        self._in_hand: weakref.WeakSet[Mailbox] = weakref.WeakSet()
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, name: str) -> bool:
        return name in self._turns

    @property
    def in_hand(self) -> int:
        """Turns that run, or have ended while their answer is still being committed and written."""
        return sum(not turn.released for turn in self._in_hand)

    async def wait_empty(self) -> None:
        """Wait until every turn has ended."""
        await self._empty.wait()

    # --- the side of the requests -------------------------------------------------------------------------

    def reading(self, tenant: str) -> RequestReading:
        """See ``Engine``."""
        return RequestReading(self._waiting, f"request {next(self._requests)}", tenant)

    def turns_away(self, tenant: str, queued: int) -> TurnRefused | None:
        """See ``Engine``. ``queued``: turns in the engine's queue after its last step. Both must agree: that queue was
        full, and it still is by the server's own count. Requests that are being read count as well; otherwise all
        requests that arrive while one place is free would be read for it.
        """
        waiting = queued and queued + self._waiting.reading
        if waiting < self._max_queued or not self._waiting.full(tenant):
            return None
        return TurnRefused("queue_full", QUEUE_FULL, self._waiting.retry_after())

    def add(self, request: Submit) -> Mailbox:
        """Add a turn that was sent; returns its mailbox. It replaces the request that is being read in this context. A
        spare one counts for nobody.
        """
        turn = self._turns[request.turn] = Mailbox(request.turn, self._cancel, (request.tenant, request.session))
        self._empty.clear()
        self._waiting.remove(REQUEST.get())
        if not request.spare:
            self._waiting.add(request.turn, request.tenant)
        self._in_hand.add(turn)
        return turn

    def cancel(self, tenant: str, session: str) -> bool:
        """See ``Engine``."""
        return any(turn.stop() for turn in self._turns.values() if turn.session == (tenant, session))

    def end(self, tenant: str, session: str, failure: Exception) -> None:
        """See ``Engine``."""
        for turn in [turn for turn in self._turns.values() if turn.session == (tenant, session)]:
            self._cancel(turn.name)
            turn.fail(failure)

    def _cancel(self, name: str) -> None:
        if name in self._turns:
            self._send_cancel(name)

    # --- the side of the engine ---------------------------------------------------------------------------

    def push(self, deltas: Sequence[Delta], cancelled: str | None = None, at: float | None = None) -> None:
        """Put deltas into the mailboxes of their turns; deltas of turns that have ended are dropped. ``cancelled``: if
        given, turns that end as cancelled fail with EngineDied of this message. ``at``: when the engine had them.
        """
        for delta in deltas:
            if (turn := self._turns.get(delta.turn)) is not None:
                if cancelled is not None and delta.finish_reason is FinishReason.CANCELLED:
                    turn.fail(EngineDied(cancelled))
                turn.push(delta, at)
                self._waiting.leave(delta.turn)
                if delta.finish_reason is not None:
                    self._pop(delta.turn)

    def refuse(self, refused: Refused) -> None:
        """Remove a turn that the engine has refused: its reader gets TurnRefused."""
        self._waiting.remove(refused.turn)
        if (turn := self._pop(refused.turn)) is not None:
            full = refused.code == "queue_full"
            turn.fail(TurnRefused(refused.code, refused.message, self._waiting.retry_after() if full else None))

    def fail(self, message: str) -> None:
        """Remove all: the engine has died. Their readers get EngineDied of this message."""
        turns, self._turns = self._turns, {}
        self._waiting.clear()
        for turn in turns.values():
            turn.fail(EngineDied(message))
        self._empty.set()

    def _pop(self, name: str) -> Mailbox | None:
        turn = self._turns.pop(name, None)
        if not self._turns:
            self._empty.set()
        return turn
