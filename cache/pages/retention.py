"""``Retention``: how much an idle session's KV is worth keeping, from the time for which its conversation is expected
to pause.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from cache.pages.eviction import payer
from cache.pages.think_time import PRIORS, GapHistogram, ThinkTimes
from cache.tier import StopKind

_SELDOM = 0.1  # of the conversations go on


class Stop:
    """The end of a turn, from which its conversation may go on: ``at`` that time. Sessions that share it are branches
    of one conversation.

    ``since``: the time from which its age counts for eviction: ``at``, or a later use that is no continuation.
    ``returned``: the conversation has gone on, and what still lies here is only a branch that was left.
    """

    __slots__ = ("_learned", "asked", "at", "kind", "returned", "scored", "since", "tenant")

    def __init__(self, tenant: str, kind: StopKind, at: float, gaps: GapHistogram, learns: bool = True) -> None:
        self.tenant = tenant
        self.kind = kind
        self.at = self.since = at
        self.asked = 0  # tokens of the turn's prompt
        self.scored = gaps  # by which it is ranked
        self.returned = False
        self._learned = [gaps] if learns else []  # which learn from its gap

    def learn_for(self, gaps: Sequence[GapHistogram]) -> None:
        """These histograms learn from its gap."""
        self._learned = list(gaps)

    def take_learned(self) -> list[GapHistogram]:
        """The histograms that learn from its gap; it is observed once."""
        learned, self._learned = self._learned, []
        return learned


class Retention:
    """Learns how long conversations pause, and ranks idle sessions by it. Used by one thread.

    A session whose tool is likely to answer within seconds is kept before one whose user reads an answer, and that one
    before a side call. Memory is bounded: see ``ThinkTimes``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: seconds, never going back."""
        self.clock = clock
        self.evictions: Counter[StopKind] = Counter()  # from the device, by the stop of the session
        self.warmed = 0  # sessions that were brought to the device because they were announced
        self.brought_back = 0  # and because they are pinned
        self._times = ThinkTimes()
        self._all = {kind: known.copy() for kind, known in PRIORS.items()}  # of all tenants

    def stop(self, tenant: str, kind: StopKind) -> Stop:
        """A turn of ``tenant`` has ended now."""
        payer_ = payer(tenant)
        gaps = self._times.of(payer_).kinds[kind]
        stop = Stop(payer_, kind, self.clock(), gaps)
        stop.learn_for([gaps, self._all[kind]])
        return stop

    def expect(self, tenant: str) -> Stop:
        """A stop of a session that a turn is about to use: ranked as one that was announced, and not learned from."""
        gaps = self._times.of(payer(tenant)).kinds[StopKind.WARM_UP]
        return Stop(payer(tenant), StopKind.WARM_UP, self.clock(), gaps, learns=False)

    def await_tools(self, stop: Stop, tools: Sequence[str]) -> None:
        """The turn that ended in ``stop`` has called these tools: of several, the one that takes longest decides."""
        if stop.kind is not StopKind.ANSWER or stop.returned:
            return
        of_tenant = self._times.of(stop.tenant)
        known = [of_tenant.tool(name) for name in dict.fromkeys(tools)] or [of_tenant.kinds[StopKind.TOOL]]
        slowest = max(known, key=lambda gaps: gaps.late)
        stop.kind, stop.scored = StopKind.TOOL, slowest
        stop.learn_for([slowest, *({of_tenant.kinds[StopKind.TOOL]} - {slowest}), self._all[StopKind.TOOL]])

    def resume(self, stop: Stop, at: float) -> float | None:
        """The conversation goes on, by a request that came at ``at``: its gap in seconds, which is learned. None if it
        had gone on before, or nothing is to be learned from it.
        """
        stop.returned = True
        gap, learned = max(0.0, at - stop.at), stop.take_learned()
        for gaps in learned:
            gaps.observe(gap)
        return gap if learned else None

    def lose(self, stop: Stop) -> None:
        """What was kept for ``stop`` is gone: whether the conversation goes on cannot be seen."""
        age = max(0.0, self.clock() - stop.at)
        for gaps in stop.take_learned():
            gaps.observe_longer(age)

    def refresh(self, stop: Stop) -> None:
        """What was kept for ``stop`` was used, without going on from it: its age counts from now."""
        stop.since = self.clock()

    def announce(self, stop: Stop) -> None:
        """The client has said that the conversation goes on soon."""
        stop.scored, stop.since = self._times.of(stop.tenant).kinds[StopKind.WARM_UP], self.clock()

    def rate(self, stop: Stop | None, now: float) -> float:
        """Returns per second of holding, expected at ``now`` (of ``clock``)."""
        if stop is None or stop.returned:
            return self._all[StopKind.SIDE].rate(0.0 if stop is None else max(0.0, now - stop.since))
        return stop.scored.rate(max(0.0, now - stop.since))

    def count_eviction(self, stop: Stop | None) -> None:
        """A session leaves the device for others."""
        self.evictions[StopKind.SIDE if stop is None or stop.returned else stop.kind] += 1

    def count_raised(self, announced: bool) -> None:
        """A session was brought to the device, as it was ``announced`` or is pinned."""
        self.warmed += announced
        self.brought_back += not announced

    def is_late(self, stop: Stop | None, now: float) -> bool:
        """Whether its age is more than nine of ten conversations take that go on."""
        return stop is None or stop.returned or now - stop.since > stop.scored.late

    def may_return(self, stop: Stop | None) -> bool:
        """Whether conversations of this kind go on often enough for their KV to be written while turns run."""
        return stop is not None and not stop.returned and stop.scored.returning > _SELDOM

    def hold_seconds(self) -> dict[str, float]:
        """For each kind of stop, the age in seconds past which a session is late, over all tenants."""
        return {str(kind): gaps.late for kind, gaps in self._all.items()}
