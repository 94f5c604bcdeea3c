"""``Scheduler``: continuous batching. It decides which turns run and how many tokens each of them feeds in the next
step.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from functools import partial

from cache import known_timelines
from cache.pages.retention import Stop
from cache.pages.session import SessionCache, common_prefix
from cache.pages.session_memory import Acquired
from cache.store import SessionStore
from cache.tier import Tier
from cache.tiers.archive import Fetch
from scheduler.core.fair_queue import FairQueue
from scheduler.core.pinned_sessions import PinnedSessions
from scheduler.core.prefetcher import Prefetcher
from scheduler.core.spare_time import SpareTime
from scheduler.core.turn import Turn, TurnStatus
from scheduler.protocol import FinishReason, Warm
from scheduler.turn_receipt import Miss, Receipt

_LOOK_AHEAD = 8  # waiting turns of one tenant that may be tried when the first one has to wait
_STOPS = 1024  # turns that have ended of which the server may still tell that they called tools
_PATIENCE = 32  # turns that may overtake one for which there is no room; then it is next
_SPARE_SHARE = 4  # a step of spare turns takes a quarter of the token budget at most, so that others soon have theirs
_BESIDE_SHARE = 16  # beside others they take a sixteenth at most


class Scheduler:
    """Waiting and running turns over one session store.

    There is no separate prefill or decode phase (the idea is vLLM's). A running turn has tokens to feed that are not in
    its cache: one while decoding, more while prefilling. Every step feeds some of them within a token budget.

    Invariants: a running turn has a session that no other turn runs on, a waiting turn has none. Pages for all tokens
    that a turn has to feed are reserved at admission, so only decoding can run out of memory; then the turn that was
    admitted last is preempted.

    Spare turns are admitted when no other turn waits, and are preempted first where another lacks pages or a place in
    the batch. They have the steps that others do not need, and of a step in which all others decode what
    ``SpareTime`` allows.
    """

    def __init__(
        self, store: SessionStore, *, max_running: int, max_step_tokens: int, max_queued: int, reuse: bool = True
    ) -> None:
        """``reuse`` False: the model keeps nothing between forwards, so no KV is reused."""
        self.store = store
        self.running: list[Turn] = []  # in order of admission
        self.waiting = FairQueue(max_queued)
        self.preemptions = 0
        self.misses: Counter[Miss] = Counter()
        self.spare_time = SpareTime()
        self._max_running = max_running
        self._reuse = reuse
        self._max_step_tokens = max_step_tokens
        self._turns: dict[str, Turn] = {}
        self._names: set[tuple[str, str]] = set()
        self._steps = 0
        self.prefetcher = Prefetcher(store)
        self.pinned = PinnedSessions(store)
        self._cornered: Turn | None = None  # as of this step
        self._stops: OrderedDict[str, Stop] = OrderedDict()  # by turn

    def __len__(self) -> int:
        return len(self._turns)

    def find(self, turn: str) -> Turn | None:
        """The unfinished turn of that id."""
        return self._turns.get(turn)

    def find_by_session(self, tenant: str, name: str) -> Turn | None:
        """The unfinished turn of a named session."""
        return next((t for t in self._turns.values() if (t.request.tenant, t.request.session) == (tenant, name)), None)

    def busy(self, tenant: str, name: str | None) -> bool:
        """Whether an unfinished turn names this session."""
        return name is not None and (tenant, name) in self._names

    def add(self, turn: Turn) -> None:
        """Queue a new turn. Raises ``QueueFull``."""
        self.waiting.add(turn, {t.request.tenant for t in self.running if t.spare is turn.spare})
        self._turns[turn.request.turn] = turn
        turn.arrived = self.store.retention.clock()
        if turn.request.session is not None:
            self._names.add((turn.request.tenant, turn.request.session))

    def schedule(self) -> list[tuple[Turn, int]]:
        """Plan the next step: the turns, and how many tokens each feeds. Turns that are admitted now have their
        receipt.
        """
        self._steps += 1
        self._cornered = None
        if self.store.archive is not None:
            self.store.archive.poll(idle=not len(self))
        self.prefetcher.poll()
        self.pinned.poll()
        self.store.residency.demote_late()
        plan: dict[Turn, int] = {}
        budget = self._max_step_tokens
        for turn in self.running[:] if self.store.threshold is not None else ():
            if turn.session is not None and turn.session.long is not self.store.is_long(len(turn.ids)):
                self._preempt(turn)  # it has crossed a RoPE threshold: all of it is computed once more
        self._fill(plan, budget, spare=False)
        if not plan and all(turn.spare for turn in self.running):
            self._fill(plan, -(-budget // _SPARE_SHARE), spare=True)
        elif plan and all(count == 1 for count in plan.values()):
            most = min(self.spare_tokens([*plan.items()]), -(-budget // _BESIDE_SHARE))
            self._fill(plan, self.spare_time.tokens(most), spare=True)
        for turn, count in plan.items():
            turn.last_step = self._steps
            self.waiting.charge(turn.request.tenant, count, spare=turn.spare)
        return list(plan.items())

    def _fill(self, plan: dict[Turn, int], budget: int, *, spare: bool) -> None:
        """Plan a step of ``budget`` tokens for the running turns, then for those that can be admitted: for the spare
        ones, or for all others.
        """
        for turn in sorted((turn for turn in self.running if turn.spare is spare), key=self._urgency):
            if budget > 0 and turn.status is TurnStatus.RUNNING and self._reserve(turn, plan):
                budget -= self._plan(plan, turn, budget)
        while budget > 0 and self._has_place(spare=spare):
            admitted = self._admit_next(spare=spare)
            if admitted is None:
                break
            budget -= self._plan(plan, admitted, budget)

    def _has_place(self, *, spare: bool) -> bool:
        """Whether another turn may run. Spare ones make a place for a turn that is not, and wait while there is one."""
        if spare:
            return len(self.running) < self._max_running and not self.waiting.has_urgent()
        if len(self.running) < self._max_running:
            return True
        if not self.waiting.has_urgent():
            return False
        return self._preempt_spare()

    def _preempt_spare(self) -> bool:
        """Preempt the spare turn that was admitted last; False if none runs."""
        victim = next((turn for turn in reversed(self.running) if turn.spare), None)
        if victim is None:
            return False
        self.preemptions += 1
        self._preempt(victim)
        return True

    @property
    def next_fed(self) -> list[Turn]:
        """The running turns that may be in the next step: spare ones only where there are no others."""
        return [turn for turn in self.running if not turn.spare] or self.running

    def spare_tokens(self, plan: list[tuple[Turn, int]]) -> int:
        """How many more tokens than those of ``plan`` a step may feed."""
        return max(0, self._max_step_tokens - sum(count for _, count in plan))

    def finish(self, turn: Turn, reason: FinishReason) -> None:
        """End a turn, waiting or running; its session is idle from now on and its KV stays."""
        assert turn.finish_reason is None
        if turn.session is not None:
            self.running.remove(turn)
            self._release(turn, turn.session)
            turn.session = None
        else:
            self.waiting.remove(turn)
        turn.status, turn.finish_reason = TurnStatus.FINISHED, reason
        del self._turns[turn.request.turn]
        if turn.request.session is not None:
            self._names.discard((turn.request.tenant, turn.request.session))

    def await_tools(self, turn: str, tools: tuple[str, ...]) -> None:
        """The turn of that id, which has ended, has called these tools. Nothing happens if it is not known any more."""
        stop = self._stops.pop(turn, None)
        if stop is not None:
            self.store.retention.await_tools(stop, tools)

    def _release(self, turn: Turn, session: SessionCache) -> None:
        """The session of a turn that ends is idle from now on."""
        session.media = None
        if not self._reuse:
            self.store.discard(session)
            return
        request = turn.request
        stop = self._stops[request.turn] = self.store.retention.stop(request.tenant, turn.stop_kind)
        if len(self._stops) > _STOPS:
            self._stops.popitem(last=False)
        if turn.is_aside:
            self._recall(turn, session)
        self.store.release(session, stop)
        if session.pinned_until > time.time():
            self.pinned.watch(session.owner, session)
        if request.parent is not None:
            self.store.refresh(request.tenant, request.parent)

    def _recall(self, turn: Turn, session: SessionCache) -> None:
        """Bring back what has left the device for a side call, which has ended."""
        for name in filter(None, {turn.request.parent, *(spared.name for spared in session.spared)}):
            if (left := self.store.find(turn.scope, name)) is None or not left.warm:
                self.prefetcher.add(Warm(turn.request.tenant, name, salt=turn.request.salt))

    def check_integrity(self) -> None:
        """Assert the invariants above."""
        for turn in self.running:
            assert turn.status is TurnStatus.RUNNING
            assert turn.session is not None
            assert turn.session.running
            assert turn.session.token_ids == turn.timeline
        assert all(t.status is TurnStatus.WAITING and t.session is None for t in self.waiting)
        assert len(self._turns) == len(self.running) + len(self.waiting)

    def _plan(self, plan: dict[Turn, int], turn: Turn, budget: int) -> int:
        """Add to ``plan`` what ``turn`` feeds in this step, returned too: nothing while its next picture is encoded."""
        assert turn.session is not None
        count = min(self._share(turn), budget)
        if turn.media is not None:
            count = turn.media.feedable(turn.session.length, count)
        if count:
            plan[turn] = count
        return count

    def _share(self, turn: Turn) -> int:
        """How many tokens ``turn`` may feed in one step: all that it has, but the last token of a prompt separately if
        sessions have states, so that there is a checkpoint before it for other continuations of the same prompt.
        """
        assert turn.session is not None
        border = turn.prompt_length - 1 - turn.session.length
        return border if self.store.stateful and border > 0 else turn.uncomputed

    def _urgency(self, turn: Turn) -> tuple[bool, int, int]:
        """Decoding turns first, those that waited longest before others; then prefills, the least served
        tenant's first.
        """
        decoding = turn.uncomputed == 1
        served = self.waiting.tokens_served(turn.request.tenant, spare=turn.spare)
        return (not decoding, turn.last_step if decoding else served, turn.last_step)

    # -- admission --------------------------------------------------------------------------------------------------

    def _admit_next(self, *, spare: bool) -> Turn | None:
        """Admit the next waiting turn that can run now: a ``spare`` one, or another."""
        for turn in self.waiting.in_order(_LOOK_AHEAD, spare=spare):
            if turn.compiling or self._awaits_prefix(turn) or self._awaits_fetch(turn):
                continue
            if (turn.fetch is None or turn.fetch.room) and self._admit(turn):
                return turn
            if turn.is_aside and self.store.is_still:
                self._cornered = turn
            if turn.fetch is not None and not turn.fetch.room and not turn.spare:
                self._preempt_spare()
            if turn.fetch is not None and not turn.fetch.tokens:
                turn.fetch = None  # what memory holds now may be on disk by the time there is room
            turn.overtaken += 1
            if turn.overtaken > _PATIENCE:
                return None
        return None

    def _awaits_prefix(self, turn: Turn) -> bool:
        """Whether a running turn is about to compute a longer prefix of this prompt than is cached: then this turn
        waits for it.

        So the n choices of a request, or many requests with one system prompt, prefill their common prefix once.
        """
        if not (self._reuse and turn.reusable):
            return False
        ids = turn.timeline
        cached = self.store.match(turn.scope, ids)
        for other in self.running:
            if other.spare and not turn.spare:
                continue  # it may get no step for long
            if other.scope == turn.scope and other.session is not None and other.uncomputed > 1:
                promised = min(common_prefix(other.session.token_ids, ids), len(ids) - 1)
                if self.store.stateful and promised < other.prompt_length - 1:
                    continue  # there will be no checkpoint where they part
                if promised > max(cached, other.session.length):
                    return True
        return False

    def _awaits_fetch(self, turn: Turn) -> bool:
        """Whether more of this prompt is being loaded from below memory. A turn requests it once, and again if that
        could not begin.
        """
        archive = self.store.archive
        if archive is None or not (self._reuse and turn.reusable):
            return False
        if turn.fetch is None or not turn.fetch.begun:
            found = archive.fetch(turn.scope, turn.request.session, turn.timeline, turn.spared_parent)
            turn.fetch = Fetch(done=True) if found is None else found
        if turn.fetch.stuck:
            turn.fetch = Fetch(done=True, miss=Miss.CHEAPER)
        return turn.fetch.room and not turn.fetch.done

    def _admit(self, turn: Turn) -> bool:
        """Waiting -> running, with pages for all it owes; False where there is no room now."""
        reuse = self._reuse and turn.reusable
        request, ids = turn.request, turn.timeline
        first, name = reuse and turn.receipt is None, request.session
        closest = known_timelines.closest(self.store, turn.scope, ids) if first else (0, None)
        moved = first and name is not None and known_timelines.is_of_other_weights(self.store, turn.scope, name, ids)
        acquire = partial(self.store.acquire, turn.scope, name, ids, reuse, side=turn.is_side, aside=turn.is_aside)
        acquired = acquire(parent=request.parent)
        while acquired is None and not turn.spare and self._preempt_spare():
            acquired = acquire(parent=request.parent)
        if acquired is None:
            return False
        pause = self.store.resume(acquired.session, turn.arrived, turn.is_ping)
        if request.parent is not None:
            self.store.refresh(request.tenant, request.parent)
        self.waiting.remove(turn)
        turn.session, turn.status = acquired.session, TurnStatus.RUNNING
        turn.session.source, turn.session.media, turn.session.key = turn.source, turn.media, turn.key
        self.store.keep(turn.session, request.keep_until)
        self.running.append(turn)
        if turn.receipt is None:
            turn.receipt = self._receipt(turn, acquired, pause, *closest, moved)
        return True

    def take_cornered(self) -> Turn | None:
        """A turn for which there is no room beside the conversation that it belongs to, and nothing will make some."""
        turn, self._cornered = self._cornered, None
        if turn is not None and turn.receipt is None:
            turn.receipt = Receipt(turn.prompt_length, 0, miss=Miss.NO_ROOM, admitted=time.monotonic())
        return turn

    def _receipt(
        self,
        turn: Turn,
        acquired: Acquired,
        pause: tuple[Stop, float] | None,
        matched: int,
        expected: int | None,
        moved: bool,
    ) -> Receipt:
        """The receipt of a turn that has just been admitted: what was reused of its prompt, and why not more.
        ``moved``: what is cached of its session was computed with other weights.
        """
        fetch = turn.fetch or Fetch()
        raised = max(0, min(fetch.have + fetch.tokens, acquired.reused) - fetch.have)
        loaded = (Tier.HOST, min(acquired.restored, acquired.reused - raised)), (fetch.source, raised)
        whole = acquired.reused >= min(matched, len(turn.ids) - 1)
        miss = None
        if moved and acquired.reused < len(turn.ids) - 1:
            miss = Miss.ADAPTER
        elif not whole:
            miss = Miss(fetch.miss) if fetch.miss is not None else self._lack
        elif fetch.miss is not None:
            miss = Miss(fetch.miss)
        elif expected is not None and matched < len(turn.ids) - 1:
            miss = Miss.DIVERGED
        if miss is not None:
            self.misses[miss] += 1
        return Receipt(
            prompt=len(turn.source or turn.ids[: turn.prompt_length]),
            cached=acquired.reused,
            loaded={tier: tokens for tier, tokens in loaded if tokens},
            load_seconds=fetch.seconds,
            miss=miss,
            matched=matched,
            expected=expected,
            admitted=time.monotonic(),
            after=None if pause is None else pause[0].kind,
            idle=None if pause is None else pause[1],
            media=len(turn.media.media) if turn.media is not None else 0,
            encoded=turn.media.to_encode(acquired.reused) if turn.media is not None else 0,
        )

    @property
    def _lack(self) -> Miss:
        """Why a session cannot be rewound to a length at which its timeline is in memory."""
        return Miss.NO_CHECKPOINT if self.store.stateful else Miss.WINDOW

    # -- preemption -------------------------------------------------------------------------------------------------

    def _reserve(self, turn: Turn, plan: dict[Turn, int]) -> bool:
        """Reserve pages for all tokens of ``turn``, preempting the turns that were admitted last if necessary. False if
        ``turn`` itself was preempted.
        """
        assert turn.session is not None
        while not self.store.reserve(turn.session, len(turn.ids)):
            last = [t for t in reversed(self.running) if t not in plan]
            victim = next((t for t in last if t.spare), last[0])
            self.preemptions += 1
            self._preempt(victim)
            if victim is turn:
                return False
        return True

    def _preempt(self, turn: Turn) -> None:
        """Running -> waiting; its KV may be evicted, and its token ids are enough to continue later."""
        assert turn.session is not None
        self.running.remove(turn)
        turn.session.media = None
        self.store.release(turn.session)
        turn.session, turn.status, turn.fetch = None, TurnStatus.WAITING, None
        self.waiting.put_back(turn)
