"""``GrammarQueue``: turns that cannot be admitted yet because their grammars are being compiled."""

from __future__ import annotations

from concurrent.futures import Future

from llguidance import LLMatcher

from scheduler.core.constraint import Grammars
from scheduler.core.turn import Turn


class GrammarQueue:
    """Turns whose grammars are being compiled on another thread; their ``compiling`` is True. ``len``: the number of
    turns. All methods belong to the engine's thread, and none waits for a compile.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._turns: list[tuple[Turn, Future[LLMatcher]]] = []

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, turn: Turn) -> None:
        """Start compiling the grammar of a turn that has one."""
        assert turn.request.grammar is not None
        turn.compiling = True
        self._turns.append((turn, self._grammars.submit(turn.request.grammar)))

    def poll(self) -> list[tuple[Turn, BaseException]]:
        """Remove the turns that have ended and those whose compile has finished, and set the constraints of the latter.
        Returns those whose grammars could not be compiled, with the error: a GrammarError if the grammar is at fault.
        """
        still, failed = [], []
        for turn, future in self._turns:
            if turn.finish_reason is None and not future.done():
                still.append((turn, future))
                continue
            assert turn.request.grammar is not None
            self._grammars.release(turn.request.grammar, future)
            if turn.finish_reason is not None:  # cancelled meanwhile
                continue
            if (error := future.exception()) is not None:
                failed.append((turn, error))
            else:
                turn.compiling, turn.constraint = False, self._grammars.constraint(future.result())
        self._turns = still
        return failed
