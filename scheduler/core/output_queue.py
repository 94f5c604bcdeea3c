"""``OutputQueue``: deltas and drawn tokens that have not been sent to the server yet."""

from __future__ import annotations

import logging

import msgspec

from scheduler.core.stop_checker import DrawnToken, StopChecker
from scheduler.core.turn import Turn
from scheduler.protocol import Delta, FinishReason

UNDECODABLE = "the reply could not be decoded"

log = logging.getLogger("warmturn.engine")


class OutputQueue:
    """Outputs of the turns, in order. Drawn tokens become deltas in ``take``, which decodes their text (on a
    GPU, while the next step runs). ``len``: the number of outputs.
    """

    def __init__(self, stop_checker: StopChecker) -> None:
        self._stop_checker = stop_checker
        self._outputs: list[tuple[Turn, Delta | DrawnToken]] = []

    def __len__(self) -> int:
        return len(self._outputs)

    def add(self, turn: Turn, output: Delta | DrawnToken) -> None:
        """Append a delta without tokens, or a drawn token."""
        self._outputs.append((turn, output))

    def take(self) -> tuple[list[Delta], list[Turn]]:
        """Remove all outputs. Returns them as deltas, and the turns that end because a token could not be decoded; the
        deltas of such a turn stop at that token.
        """
        deltas: list[Delta] = []
        broken: dict[Turn, None] = {}  # in order
        for turn, output in self._outputs:
            if turn in broken:
                continue
            deltas.append(_flush_delta(turn, output) if isinstance(output, Delta) else self._make_delta(output))
            if deltas[-1].error == UNDECODABLE:
                broken[turn] = None
        self._outputs = []
        return deltas, list(broken)

    def _make_delta(self, drawn: DrawnToken) -> Delta:
        """The delta of a drawn token; if its text cannot be decoded, one that ends the turn with an error."""
        try:
            return self._stop_checker.delta(drawn)
        except Exception:
            log.exception("turn %s failed", drawn.turn.request.turn)
        return Delta(drawn.turn.request.turn, finish_reason=FinishReason.ERROR, error=UNDECODABLE)


def _flush_delta(turn: Turn, delta: Delta) -> Delta:
    """A delta without a token; of a turn that was cancelled, with the text that was held back."""
    if delta.finish_reason != FinishReason.CANCELLED or not turn.generated:
        return delta
    try:
        return msgspec.structs.replace(delta, text=turn.text.flush())
    except Exception:
        log.exception("turn %s was cancelled in text that cannot be decoded", turn.request.turn)
    return delta
