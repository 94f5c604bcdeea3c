"""``LaunchedStep``: a step that the device may still be computing; and what it fed and drafted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from cache.memory.stream import HostCopy
from cache.pages.session import Position
from cache.store import SessionStore
from scheduler.core.drafters import Draft
from scheduler.core.sampling import SamplerOutput
from scheduler.core.step_rows import StepRows
from scheduler.core.turn import Turn
from scheduler.model.runner import ModelRunner


@dataclass
class DraftedRows:
    """A draft that a step has fed: the logits behind its i-th token are in row ``first + i``. ``after`` is where the
    step has left the session. ``accepted`` of its tokens have been drawn.
    """

    turn: Turn
    draft: Draft
    first: int
    after: Position
    accepted: int = 0

    def agrees(self) -> bool:
        """Whether the token that was drawn last is the drafted one; then its keys and values count as computed. A
        state counts when all of them are: else the next step feeds once more what was right.
        """
        turn, ids = self.turn, self.draft.ids
        if turn.finish_reason is not None or self.accepted >= len(ids) or turn.ids[-1] != ids[self.accepted]:
            return False
        assert turn.session is not None
        self.accepted += 1
        if not turn.session.stateful:
            turn.session.on_fed(1)
        elif self.accepted == len(ids):
            turn.session.advance(self.after)
        return True


class LaunchedStep(NamedTuple):
    """A step that the device may still be computing: its plan, the time of its start, the turns with prompt
    log-probabilities, the turns that end without a token, and the turns for which a token is drawn. ``done`` completes
    with the step. ``drafted``: the drafts that were fed too, and the step's ``logits [rows, V]`` if there are any.
    """

    plan: list[tuple[Turn, int]]
    started: float  # time.perf_counter()
    launched: float  # time.perf_counter() when the device had all of its work
    prompt_outputs: list[tuple[Turn, int, SamplerOutput]]  # behind how many tokens
    ended: list[Turn]
    drawing: list[Turn]
    drawn: SamplerOutput | None
    done: HostCopy
    drafted: list[DraftedRows]
    logits: torch.Tensor | None


def reserve_drafts(store: SessionStore, drafts: dict[Turn, Draft]) -> dict[Turn, Draft]:
    """The drafts for which there are pages, and with which no timeline crosses a RoPE threshold."""
    kept = {}
    for turn, draft in drafts.items():
        assert turn.session is not None
        most = len(turn.ids) + len(draft.ids)
        crosses = store.threshold is not None and store.is_long(most) is not turn.session.long
        if not crosses and store.reserve(turn.session, most):
            kept[turn] = draft
    return kept


def feed(
    runner: ModelRunner, plan: list[tuple[Turn, int]], drafts: dict[Turn, Draft], rows: StepRows
) -> tuple[torch.Tensor, dict[Turn, Position]]:
    """Run the model on a plan with drafts; returns the logits ``[len(rows.tokens), V]`` float32, and where the step has
    left the sessions that were drafted for. Turns that want a state get it. Behind it a session has the tokens of its
    turn only, whatever was drafted.
    """
    before, after = {}, {}
    for turn, draft in drafts.items():
        assert turn.session is not None
        before[turn] = turn.session.draft(draft.ids)
    try:
        sizes = [(turn, count + len(drafts[turn].ids) if turn in drafts else count) for turn, count in plan]
        wanting = [(turn, at) for turn, at in rows.last if turn.request.state]
        work = [(turn.session, size) for turn, size in sizes if turn.session is not None]
        logits = runner.run(work, rows.tokens, states=bool(wanting))
    finally:
        for turn in drafts:
            assert turn.session is not None
            after[turn] = turn.session.undraft(before[turn], len(turn.ids))
    if wanting:
        logits, states = logits[:, : -runner.state_size], logits[:, -runner.state_size :]
        for turn, at in wanting:
            turn.state = HostCopy(states[at].contiguous())
    return logits, after


def prompt_logprobs(turn: Turn, logits: torch.Tensor) -> tuple[Turn, int, SamplerOutput]:
    """Log-probabilities of the prompt tokens that ``logits [count, V]`` predict, behind how many tokens."""
    assert turn.session is not None
    first = turn.session.length - logits.shape[0]
    targets = turn.ids[first + 1 : turn.session.length + 1]
    wanted = [turn.request.prompt_logprobs] * len(targets)
    return turn, first, SamplerOutput(logits[: len(targets)], targets, wanted)
