"""``Mailbox``: the queue of a turn's deltas, between the engine's socket and the task that writes the response."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from scheduler.protocol import Delta
from scheduler.turn_receipt import Receipt
from server.engine.news import News
from server.errors import ApiError

BACKLOG = 16 * 1024 * 1024  # bytes of what waits for one reader; some 30,000 tokens with 20 alternatives each
MERGE_AT = 64  # deltas that wait are made one and packed: that takes a tenth of their room

encoder = msgspec.msgpack.Encoder()
decoder = msgspec.msgpack.Decoder(Delta)


class Mailbox:
    """The queue between the task that reads the engine's socket and the one that writes the response.

    Invariant: deltas are read in the order in which they came, each exactly once, and the failure (if any) after the
    last of them. ``push`` and ``fail`` never wait. The connection limits how long a reader may stall; if more than
    ``BACKLOG`` bytes wait here, the turn is cancelled, the waiting deltas are dropped, and the turn fails.
    """

    def __init__(self, name: str, cancel: Callable[[str], None], session: tuple[str, str | None] | None = None) -> None:
        """``cancel`` is called with the ``name``; ``session``: tenant and session, if the turn runs on a named one."""
        self.name = name
        self.session = session
        self._cancel = cancel
        self.receipt: Receipt | None = None
        self.news = News()
        self.patience = 1
        self.heard: Callable[[Delta, float | None], None] = unheard
        self._packed: list[bytes] = []  # what came first, each piece a merged delta
        self._packed_bytes = 0
        self._deltas: list[Delta] = []  # what came last, fewer than ``MERGE_AT``
        self._failure: Exception | None = None
        self._closed = False  # nothing more will be pushed
        self.released = False  # the reader is done with it, its answer included
        self.stopped = False
        self.spoke = False

    # --- the side of the engine ---------------------------------------------------------------------------

    def push(self, delta: Delta, at: float | None = None) -> None:
        """Take one delta; the one with a finish reason closes the turn. ``at``: when the engine had it (monotonic)."""
        if self._closed:
            return
        self.heard(delta, at)
        if delta.receipt is not None:
            self.receipt = delta.receipt
        self.spoke = self.spoke or bool(delta.tokens)
        self._closed = delta.finish_reason is not None
        if self._closed or delta.tokens or delta.text or delta.logprobs or delta.prompt_logprobs:
            self._keep(delta)
        if self._closed or delta.receipt is not None or len(self._deltas) >= self.patience:
            self.news.set()

    def fail(self, failure: Exception) -> None:
        """Close the turn with an exception for its reader."""
        if not self._closed:
            self._closed = True
            self._failure = failure
            self.news.set()

    def _keep(self, delta: Delta) -> None:
        self._deltas.append(delta)
        if len(self._deltas) < MERGE_AT:
            return
        piece = encoder.encode(merge(self._deltas))
        self._deltas = []
        self._packed.append(piece)
        self._packed_bytes += len(piece)
        if self._packed_bytes > BACKLOG:
            self._packed.clear()
            self._packed_bytes = 0
            self.cancel()
            self._closed = True
            self._failure = ApiError(408, "The reply was not read in time.", code="reader_too_slow")

    # --- the side of the response -------------------------------------------------------------------------

    def take(self) -> Delta | None:
        if self._packed:
            piece = self._packed.pop(0)
            self._packed_bytes -= len(piece)
            delta = decoder.decode(piece)
        elif self._deltas:
            delta, self._deltas = merge(self._deltas), []
        elif self._failure is not None:
            raise self._failure
        else:
            return None
        if self._packed or self._deltas or self._failure is not None:
            self.news.set()
        return delta

    def stop(self) -> bool:
        if self.released or self._closed:
            return False
        self.stopped = True
        self._cancel(self.name)
        return True

    def cancel(self) -> None:
        if not self.released and not self._closed:
            self._cancel(self.name)
        self.released = True


def unheard(delta: Delta, at: float | None) -> None:
    """The default of ``heard``: does nothing."""


def merge(deltas: Sequence[Delta]) -> Delta:
    """Successive deltas of one turn as one, without receipt. Finish reason, stop and error are the last one's."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last if last.receipt is None else msgspec.structs.replace(last, receipt=None)
    return Delta(
        turn=last.turn,
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        text="".join(delta.text for delta in deltas),
        finish_reason=last.finish_reason,
        stop=last.stop,
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        prompt_logprobs=tuple(entry for delta in deltas for entry in delta.prompt_logprobs),
        error=last.error,
        thinking_cut=any(delta.thinking_cut for delta in deltas),
        drafts=last.drafts,
        state=last.state,
        encoding=last.encoding,
    )
