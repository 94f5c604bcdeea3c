"""``ModelDrafter``: a small model proposes the tokens that it would say itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch

from cache.pages.session import Position, SessionCache, common_prefix
from cache.store import SessionStore
from cache.tiers.archive import Fetch
from scheduler.core.drafters import MOST, Draft
from scheduler.core.turn import Turn
from scheduler.model.runner import ModelRunner
from scheduler.protocol import DraftSource

_MOST_FED = 256  # tokens of a step: a long history is caught up with in several steps
_WEIGHT = 0.1  # of a measurement


class ModelDrafter:
    """Greedy proposals of a draft model, for all turns of a step together.

    The draft model has a session store and tiers of its own. A turn's session there has the same tenant and name as
    the turn's own one, so it is resumed, evicted, stored and deleted like that. It is fed what the turn has said since
    it was last asked; what it drafted itself never stays.
    """

    def __init__(self, runner: ModelRunner, store: SessionStore, width: int, context: int) -> None:
        """``width``: tokens that the served model knows. ``context``: the longest timeline of the draft model."""
        self.source = DraftSource.MODEL
        self.most = MOST
        self.store = store
        self.seconds = 0.0  # for each token that it drafts; 0: not measured
        self._runner = runner
        self._width = width
        self._context = context
        self._sessions: dict[Turn, SessionCache] = {}  # of turns that run, or did at the last look
        self._fetches: WeakKeyDictionary[Turn, Fetch] = WeakKeyDictionary()

    def propose(self, wanted: Mapping[Turn, int], room: int) -> dict[Turn, Draft]:
        """Up to that many tokens for each of the turns; none for a turn whose KV is being loaded, has no memory, or is
        so far behind that it cannot catch up within ``room`` tokens.
        """
        self.release_ended()
        ready: dict[Turn, SessionCache] = {}
        for turn in wanted:
            session, fed = self._catch_up(turn, min(room, _MOST_FED))
            room -= fed
            if session is not None:
                ready[turn] = session
        most = {turn: min(wanted[turn], self._context - len(turn.ids)) for turn in ready}
        drafting = [turn for turn in ready if most[turn] > 0 and self.store.reserve(ready[turn], _end(turn, most))]
        if not drafting:
            return {}
        started = time.perf_counter()
        drafts = self._draft({turn: ready[turn] for turn in drafting}, most)
        spent = (time.perf_counter() - started) / sum(len(ids) for ids in drafts.values())
        self.seconds += (spent - self.seconds) * (_WEIGHT if self.seconds else 1.0)
        return {turn: Draft(DraftSource.MODEL, ids) for turn, ids in drafts.items()}

    def poll(self, idle: bool) -> None:
        """Process what has been read and written. ``idle``: no turn of the engine runs or waits."""
        self.release_ended()
        if self.store.archive is not None:
            self.store.archive.poll(idle=idle)
        self.store.residency.demote_late()

    def release_ended(self) -> None:
        """The sessions of turns that do not run any more are idle."""
        for turn, session in list(self._sessions.items()):
            if turn.session is None:
                del self._sessions[turn]
                self.store.release(session, self.store.retention.stop(turn.request.tenant, turn.stop_kind))

    def _catch_up(self, turn: Turn, most: int) -> tuple[SessionCache | None, int]:
        """The turn's session, if it owes at most ``most`` tokens, and how many; else None, and how many of them it was
        fed now.
        """
        if self.store.is_long(len(turn.ids) + _MOST_FED):  # past a threshold of the draft model's
            return None, 0
        session = self._sessions.get(turn) or self._acquire(turn)
        if session is None:
            return None, 0
        assert session.length <= common_prefix(session.token_ids, turn.ids)
        session.token_ids = turn.ids[:]
        if not self.store.reserve(session, len(turn.ids)):
            return None, 0
        owed = len(turn.ids) - session.length
        if owed <= most:
            return session, owed
        if most > 0:
            self._runner.run([(session, most)], [])
        return None, max(0, most)

    def _acquire(self, turn: Turn) -> SessionCache | None:
        """A session with as much of the turn's timeline as the draft model's store has."""
        if len(turn.ids) >= self._context or self._awaits_fetch(turn):
            return None
        name = turn.request.session
        if name is not None and self.store.busy(turn.scope, name):
            return None
        acquired = self.store.acquire(turn.scope, name, turn.ids, side=turn.is_side)
        if acquired is None:
            return None
        self.store.resume(acquired.session, turn.arrived)
        self._sessions[turn] = acquired.session
        return acquired.session

    def _awaits_fetch(self, turn: Turn) -> bool:
        """Whether stored KV is being loaded."""
        archive = self.store.archive
        if archive is None:
            return False
        fetch = self._fetches.get(turn)
        if fetch is None or not fetch.begun:
            fetch = self._fetches[turn] = archive.fetch(turn.scope, turn.request.session, turn.ids) or Fetch(done=True)
        return fetch.room and not fetch.done and not fetch.stuck

    def _draft(self, sessions: dict[Turn, SessionCache], most: Mapping[Turn, int]) -> dict[Turn, list[int]]:
        """Feed what the sessions owe, then token by token what the draft model says."""
        drafts: dict[Turn, list[int]] = {turn: [] for turn in sessions}
        counts = {turn: len(turn.ids) - session.length for turn, session in sessions.items()}
        before: dict[Turn, Position] = {}
        try:
            while counts:
                said = self._say({sessions[turn]: count for turn, count in counts.items()})
                for turn, token in zip(list(counts), said, strict=True):
                    if not drafts[turn]:
                        before[turn] = sessions[turn].draft(())
                    drafts[turn].append(token)
                    if len(drafts[turn]) < most[turn]:
                        sessions[turn].draft((token,))
                        counts[turn] = 1
                    else:
                        del counts[turn]
        finally:
            for turn, position in before.items():
                sessions[turn].undraft(position, len(turn.ids))
        return drafts

    def _say(self, work: dict[SessionCache, int]) -> list[int]:
        """The likeliest token behind the next tokens of each session."""
        rows, row = [], 0
        for count in work.values():
            row += count
            rows.append(row - 1)
        logits = self._runner.run(list(work.items()), rows)[:, : self._width]
        chosen: list[int] = torch.argmax(logits, -1).tolist()
        return chosen


def _end(turn: Turn, most: Mapping[Turn, int]) -> int:
    return len(turn.ids) + most[turn]
