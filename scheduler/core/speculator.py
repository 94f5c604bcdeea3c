"""``Speculator``: decides which drafted tokens a step feeds, and learns from what was accepted.

Speculative decoding: a step feeds drafted tokens behind the pending one, and a draft is accepted if and only if the
token drawn at its position is the draft. So no reply depends on it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from cache.media_ids import MEDIA
from scheduler.core.drafters import (
    MOST,
    AskedDrafter,
    Draft,
    Drafter,
    GrammarDrafter,
    HistoryDrafter,
    PredictionDrafter,
    SessionsDrafter,
)
from scheduler.core.heads_drafter import HeadsDrafter
from scheduler.core.model_drafter import ModelDrafter
from scheduler.core.sessions_index import SessionsIndex
from scheduler.core.step_costs import StepCosts
from scheduler.core.turn import Turn
from scheduler.protocol import DraftSource, unpack_ids

log = logging.getLogger("warmturn.engine")

_GAIN = 1.02  # tokens per cost that drafting must gain
_LEAST = 0.04  # the chance that a token behind is right with which it is not worth computing whether to feed it
_TURN_WEIGHT = 4.0  # drafts of its own after which a turn's record counts as much as that of all turns
_FORGETTING = 0.9  # of a turn's record, per draft
_GLOBAL_FORGETTING = 0.998
_EVERY = 64  # tokens of a turn after which a draft model that was not worth asking is tried once more
_PRIORS = {
    DraftSource.GRAMMAR: 0.95,
    DraftSource.PREDICTION: 0.8,
    DraftSource.HISTORY: 0.6,
    DraftSource.SESSIONS: 0.6,
    DraftSource.MODEL: 0.6,
    DraftSource.HEADS: 0.6,
}
_INDEXED, _INDEXED_IDLE = 1 << 12, 1 << 16  # tokens of stored sessions between two steps: about 1 ms and 15 ms
_LENGTHS = (4, 6, 10, 20)  # matched tokens, in which proposals of one source are told apart

Kind = tuple[DraftSource, int]  # and how many tokens matched


@dataclass
class Record:
    """Drafted tokens that were compared with drawn ones, and how many of these were equal."""

    tested: float = 0.0
    accepted: float = 0.0

    def add(self, tested: int, accepted: int, forgetting: float) -> None:
        self.tested = self.tested * forgetting + tested
        self.accepted = self.accepted * forgetting + accepted


@dataclass
class TurnState:
    """The drafters of one turn and their record. ``untried``: a proposal that was not fed, with the number of tokens
    that were generated then.
    """

    drafters: list[Drafter]
    records: dict[Kind, Record] = field(default_factory=dict)
    untried: tuple[Draft, int] | None = None


class Speculator:
    """Drafts for the turns of a step. The most promising drafter of a turn is the first that proposes something:
    grammar, prediction, the own history, other sessions. A token is drafted if the tokens per cost that the step is
    expected to give become more by it. Where nothing of them is drafted, the draft model or the model's own MTP layers
    are asked, if there are any.
    """

    def __init__(
        self, shared: SessionsIndex, context: int, stateful: bool = False, asked: AskedDrafter | None = None
    ) -> None:
        """``context``: the most tokens of a timeline. ``stateful``: sessions have states that must not read a token
        that is not in their reply. ``asked``: of the draft model or of the model's own layers.
        """
        self.drafted: Counter[DraftSource] = Counter()
        self.accepted: Counter[DraftSource] = Counter()
        self.costs = StepCosts()
        self._shared = shared
        self._context = context
        self._stateful = stateful
        self.asked = asked
        self._fed: list[tuple[Turn, int, int]] = []  # in the step: the session's length before it, and how many tokens
        self._records: dict[Kind, Record] = {}
        self._turns: WeakKeyDictionary[Turn, TurnState] = WeakKeyDictionary()

    @property
    def draft_model(self) -> ModelDrafter | None:
        return self.asked if isinstance(self.asked, ModelDrafter) else None

    def draft(self, plan: list[tuple[Turn, int]], room: int) -> dict[Turn, Draft]:
        """Drafts of at most ``room`` tokens in all for the turns of ``plan`` that decode, for each at least one token
        or none.
        """
        fed = sum(count for _, count in plan)
        expected = float(sum(turn.uncomputed == count for turn, count in plan))
        chosen: dict[Turn, Draft] = {}
        asked: dict[Turn, int] = {}
        for turn, count in plan:
            if count != 1 or turn.uncomputed != 1 or not turn.generated or not turn.request.speculate:
                continue
            state = self._state(turn)
            self._test_untried(turn, state)
            most = min(MOST, room, self._room_of(turn))
            if most <= 0:
                continue
            draft, size, gained = self._propose(turn, state, most), 0, 0.0
            if draft is not None:
                size, gained = self._worth(draft, self._chance(state, draft), fed, expected)
                if size:
                    chosen[turn] = draft._replace(ids=draft.ids[:size])
                else:
                    state.untried = draft, turn.generated
            if not size and self.asked is not None and turn.media is None:  # they know no pictures
                size, gained = self._worth_asking(turn, state, most, fed, expected)
                if size:
                    asked[turn] = size
            fed, expected, room = fed + size, expected + gained, room - size
        return {**chosen, **self._ask(asked, room)} if asked else chosen

    def poll(self, idle: bool) -> None:
        """Between steps: what was on disk at the start is indexed, and the draft model's sessions are read or written.
        ``idle``: no turn runs or waits.
        """
        self._shared.add_stored(_INDEXED_IDLE if idle else _INDEXED)
        if self.asked is not None:
            self.asked.poll(idle)

    def begin(self, plan: list[tuple[Turn, int]], drafts: dict[Turn, Draft]) -> None:
        """A step is about to feed ``plan`` and ``drafts``."""
        if isinstance(self.asked, HeadsDrafter):
            sizes = [(turn, count + len(drafts[turn].ids) if turn in drafts else count) for turn, count in plan]
            self._fed = [(turn, turn.session.length, size) for turn, size in sizes if turn.session is not None]
            self.asked.begin()

    def on_verified(self) -> None:
        """The step's drafts are verified: what counts as fed is known."""
        if isinstance(self.asked, HeadsDrafter):
            self.asked.read(self._fed)
            self._fed = []

    def learn(self, turn: Turn, draft: Draft, accepted: int) -> None:
        """``accepted`` tokens of a draft that was fed were drawn."""
        self.drafted[draft.source] += len(draft.ids)
        self.accepted[draft.source] += accepted
        drafted, before = turn.drafts.get(draft.source, (0, 0))
        turn.drafts[draft.source] = drafted + len(draft.ids), before + accepted
        self._count(self._state(turn), draft, min(len(draft.ids), accepted + 1), accepted)

    def on_end(self, turn: Turn) -> None:
        """A turn is about to end: from now on its timeline may be proposed to other turns of its tenant."""
        if turn.session is not None:
            self._shared.add(turn.scope, turn.session)

    def _state(self, turn: Turn) -> TurnState:
        state = self._turns.get(turn)
        if state is None:
            drafters: list[Drafter] = [GrammarDrafter()] if turn.request.grammar is not None else []
            if turn.request.prediction:
                drafters.append(PredictionDrafter(unpack_ids(turn.request.prediction)[: self._context]))
            state = self._turns[turn] = TurnState([*drafters, HistoryDrafter(), SessionsDrafter(self._shared)])
        return state

    def _room_of(self, turn: Turn) -> int:
        """Tokens that may be drafted before the turn must end: the one that is drawn behind them counts too."""
        left = self._context - len(turn.ids)
        if turn.limit is not None:
            left = min(left, turn.limit - turn.generated)
        return left - 1

    def _propose(self, turn: Turn, state: TurnState, most: int) -> Draft | None:
        for drafter in state.drafters:
            draft = drafter.propose(turn, most)
            if draft is not None and (ids := spoken_part(draft.ids)):
                return draft._replace(ids=ids)
        return None

    def _worth_asking(self, turn: Turn, state: TurnState, most: int, fed: int, expected: float) -> tuple[int, float]:
        """``_worth`` of what may be proposed if that is asked for; one token now and then if that is nothing."""
        assert self.asked is not None
        draft = Draft(self.asked.source, range(min(most, self.asked.most)))
        each = self.asked.seconds / self.costs.unit if self.costs.unit else 0.0
        found = self._worth(draft, self._chance(state, draft), fed, expected, each)
        return (1, 0.0) if not found[0] and turn.generated % _EVERY == 1 else found

    def _ask(self, wanted: dict[Turn, int], room: int) -> dict[Turn, Draft]:
        """Proposals of what must be asked, which may read ``room`` tokens first. It is not asked again after it has
        failed: turns go on without it.
        """
        assert self.asked is not None
        try:
            return self.asked.propose(wanted, room)
        except Exception as error:  # out of memory, or a bug in a model
            log.error("drafting by %s failed and is not tried any more", self.asked.source, exc_info=error)
            self.asked = None
            return {}

    def _test_untried(self, turn: Turn, state: TurnState) -> None:
        """Compare a proposal that was not worth feeding with what was drawn: so a drafter that has become better is
        noticed.
        """
        if state.untried is None:
            return
        (draft, generated), state.untried = state.untried, None
        drawn = turn.ids[turn.prompt_length + generated :]
        if drawn:
            self._count(state, draft, 1, int(drawn[0] == draft.ids[0]))

    def _count(self, state: TurnState, draft: Draft, tested: int, accepted: int) -> None:
        kind = kind_of(draft)
        state.records.setdefault(kind, Record()).add(tested, accepted, _FORGETTING)
        self._records.setdefault(kind, Record()).add(tested, accepted, _GLOBAL_FORGETTING)

    def _chance(self, state: TurnState, draft: Draft) -> float:
        """The probability that the next token of a draft is right if those before it were."""
        kind = kind_of(draft)
        everyone, own = self._records.get(kind, Record()), state.records.get(kind, Record())
        usual = (everyone.accepted + _PRIORS[draft.source] * 2) / (everyone.tested + 2)
        return (own.accepted + usual * _TURN_WEIGHT) / (own.tested + _TURN_WEIGHT)

    def _worth(self, draft: Draft, chance: float, fed: int, expected: float, each: float = 0.0) -> tuple[int, float]:
        """How many tokens of a draft to feed in a step that feeds ``fed`` tokens and is expected to give ``expected``,
        and how many more these are expected to give. ``each``: what drafting a token costs.
        """
        best, size, gained = expected / self.costs.relative(fed) * _GAIN, 0, 0.0
        more, right = 0.0, 1.0
        for count in range(1, len(draft.ids) + 1):
            right *= chance
            if right < _LEAST:
                break
            more += right
            cost = self.costs.relative(fed + count) + each * count
            if self._stateful:  # the next step feeds once more what was right
                cost += (1 - right) * (self.costs.relative(fed + math.ceil(1 + more)) - self.costs.relative(fed))
            rate = (expected + more) / cost
            if rate > best:
                best, size, gained = rate, count, more
        return size, gained


def spoken_part(ids: Sequence[int]) -> Sequence[int]:
    """What stands in front of the first picture in ``ids``: no model says one."""
    return next((ids[:at] for at, token in enumerate(ids) if token >= MEDIA), ids)


def kind_of(draft: Draft) -> Kind:
    """The kind of a draft, by which records are kept."""
    return draft.source, sum(draft.length >= length for length in _LENGTHS)
