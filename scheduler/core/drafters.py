"""Drafters: each proposes the tokens that may follow a turn's timeline, from one source."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from scheduler.core.ngrams import NgramIndex
from scheduler.core.sessions_index import SessionsIndex
from scheduler.core.turn import Turn
from scheduler.protocol import DraftSource

MOST = 16  # drafted tokens of a turn in one step


class Draft(NamedTuple):
    """Proposed tokens. ``length``: how many tokens matched, as a sign of how good the proposal is; 0 if that does not
    apply.
    """

    source: DraftSource
    ids: Sequence[int]
    length: int = 0


class Drafter(Protocol):
    """Proposes tokens for turns. One object serves one turn, and is called after each of its tokens."""

    def propose(self, turn: Turn, most: int) -> Draft | None:
        """Up to ``most`` tokens, at least one, that may follow ``turn.ids``; None if it has none."""


class AskedDrafter(Protocol):
    """Proposes tokens that it must compute first, for all turns of a step together. ``most``: tokens of a draft.
    ``seconds``: what each of them takes; 0: not measured.
    """

    source: DraftSource
    most: int
    seconds: float

    def propose(self, wanted: Mapping[Turn, int], room: int) -> dict[Turn, Draft]:
        """Up to that many tokens for each of the turns, at least one, or none. Before them it may feed what it has not
        seen of the timelines, at most ``room`` tokens in all.
        """

    def poll(self, idle: bool) -> None:
        """Between steps. ``idle``: no turn of the engine runs or waits."""


class GrammarDrafter:
    """Proposes what the grammar forces."""

    def propose(self, turn: Turn, most: int) -> Draft | None:
        forced = turn.constraint.forced_tokens() if turn.constraint is not None else []
        return Draft(DraftSource.GRAMMAR, forced[:most]) if forced else None


class PredictionDrafter:
    """Proposes what follows in the client's prediction. While the reply agrees with it, the next tokens; after it has
    left it, those behind the next place that agrees.
    """

    def __init__(self, prediction: array[int]) -> None:
        self._prediction = prediction
        self._at = 0  # the position in the prediction that is expected next
        self._seen = 0  # generated tokens that were compared
        ids = np.array(prediction, np.int64)
        self._pairs = ids[:-1] << 32 | ids[1:]  # each two tokens in a row

    def propose(self, turn: Turn, most: int) -> Draft | None:
        agrees = self._follow(turn)
        if not agrees and turn.generated:
            at = self._find(turn.ids[-2:]) if turn.generated > 1 else None
            if at is None:
                return None
            self._at = at
        ids = self._prediction[self._at : self._at + most]
        return Draft(DraftSource.PREDICTION, ids) if ids else None

    def _follow(self, turn: Turn) -> bool:
        """Advance by the new tokens; whether the last one was the expected one."""
        agrees = turn.generated == 0
        for token in turn.ids[turn.prompt_length + self._seen :]:
            agrees = self._at < len(self._prediction) and self._prediction[self._at] == token
            self._at += agrees
        self._seen = turn.generated
        return agrees

    def _find(self, last: array[int]) -> int | None:
        """The position behind the nearest occurrence of the two ``last`` tokens, behind the expected position, else the
        first.
        """
        places = np.flatnonzero(self._pairs == (last[0] << 32 | last[1])) + 2
        if not len(places):
            return None
        return int(places[np.searchsorted(places, self._at, "right") % len(places)])


class HistoryDrafter:
    """Proposes what followed the longest earlier occurrence of the timeline's last tokens."""

    def __init__(self) -> None:
        self._index = NgramIndex()

    def propose(self, turn: Turn, most: int) -> Draft | None:
        match = self._index.find(turn.ids)
        if match is None:
            return None
        ids = turn.ids[match.stop : match.stop + most]
        while len(ids) < most:  # what repeats itself goes on doing so
            ids.extend(ids[: most - len(ids)])
        return Draft(DraftSource.HISTORY, ids, match.length)


class SessionsDrafter:
    """Proposes what followed the timeline's last tokens in another session of the same tenant (and salt)."""

    def __init__(self, index: SessionsIndex) -> None:
        self._index = index

    def propose(self, turn: Turn, most: int) -> Draft | None:
        found = self._index.find(turn.scope, turn.ids, turn.session)
        if found is None:
            return None
        other, match = found
        ids = other.shareable[match.stop : match.stop + most]
        return Draft(DraftSource.SESSIONS, ids, match.length) if ids else None
