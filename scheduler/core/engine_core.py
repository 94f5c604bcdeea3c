"""``EngineCore``: the engine's loop, which admits turns, runs steps and delivers deltas.

A step has three parts. ``launch`` schedules turns, runs the forward and draws tokens. ``complete`` appends the drawn
token to each turn and decides whether it ends the turn; the token has not been fed yet. ``take_outputs`` decodes text
and makes one message. ``step`` runs the parts in order: on a GPU the outputs of a step are decoded and delivered while
the next step runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import torch

from cache.memory.stream import HostCopy, put
from scheduler.core.constraint import GrammarError, Grammars
from scheduler.core.drafters import Draft
from scheduler.core.fair_queue import QueueFull
from scheduler.core.gauges import RecentStats, StepCounters, read_stats
from scheduler.core.grammar_queue import GrammarQueue
from scheduler.core.input_processor import InputProcessor
from scheduler.core.launched_step import DraftedRows, LaunchedStep, feed, prompt_logprobs, reserve_drafts
from scheduler.core.media_encoder import MediaEncoder
from scheduler.core.model_drafter import ModelDrafter
from scheduler.core.output_queue import UNDECODABLE, OutputQueue
from scheduler.core.sampling import SampledToken, Sampler
from scheduler.core.scheduler import Scheduler
from scheduler.core.speculator import Speculator
from scheduler.core.step_rows import StepRows
from scheduler.core.stop_checker import StopChecker
from scheduler.core.text import Vocabulary
from scheduler.core.turn import Turn
from scheduler.core.turn_limits import Limits
from scheduler.engine_stats import Stats
from scheduler.media.media_store import MediaStore
from scheduler.model.runner import ModelRunner
from scheduler.parallel.ranks import RankLost
from scheduler.protocol import (
    QUEUE_FULL,
    AwaitTools,
    Cancel,
    Delta,
    FinishReason,
    Refused,
    StepOutputs,
    Submit,
    TokenLogprob,
    Warm,
)

log = logging.getLogger("warmturn.engine")

_MAX_FAILURES = 8  # failed steps in a row after which the engine gives up

Deliver = Callable[[LaunchedStep | None, StepOutputs], object]


class EngineCore:
    """The engine's loop. ``submit``, ``cancel`` and ``end`` are called between steps, or while ``step`` delivers."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        vocabulary: Vocabulary,
        eos_token_ids: tuple[int, ...],
        limits: Limits,
        grammars: Grammars,
        speculator: Speculator | None = None,
        media_store: MediaStore | None = None,
    ) -> None:
        """``speculator``: None if no tokens are drafted. ``media_store``: None if the model takes none."""
        self.media_store, self.adapters = media_store, runner.adapters
        self.scheduler = scheduler
        self._runner = runner
        self._encoder = None if media_store is None else MediaEncoder(media_store, self._fail)
        self._vocabulary = vocabulary
        self._input_processor = InputProcessor(vocabulary, limits, media_store, runner.adapters)
        self._stop_checker = StopChecker(vocabulary, eos_token_ids, limits.context)
        self._sampler = Sampler(eos_token_ids)
        self._compiling = GrammarQueue(grammars)
        self._refused: list[Refused] = []
        self._outputs = OutputQueue(self._stop_checker)
        self._speculator = speculator
        self._failures = 0  # steps in a row
        self.stalled = False  # the last step had nothing that could run
        self._counters, self._recent = StepCounters(), RecentStats(self.stats)

    @property
    def idle(self) -> bool:
        """Whether there are no turns and no outputs to deliver."""
        return not len(self.scheduler) and not self._outputs

    @property
    def drafter(self) -> ModelDrafter | None:
        return None if self._speculator is None else self._speculator.draft_model

    @property
    def overlaps(self) -> bool:
        """Whether the device computes asynchronously between ``launch`` and ``complete``."""
        return self._runner.overlaps

    def submit(self, request: Submit) -> Refused | None:
        """Add a turn to the queue; returns the reason if it is refused."""
        if self.scheduler.find(request.turn) is not None:
            return Refused(request.turn, "invalid_prompt", "A turn of this id is running.")
        if self.scheduler.busy(request.tenant, request.session):
            return Refused(request.turn, "session_busy", "A turn of this session is running.")
        turn = self._input_processor.make_turn(request)
        if isinstance(turn, Refused):
            return turn
        try:
            self.scheduler.add(turn)
        except QueueFull:
            crowding = self.scheduler.waiting.find_crowding(request.tenant)
            if crowding is None:
                return Refused(request.turn, "queue_full", QUEUE_FULL)
            self.scheduler.finish(crowding, FinishReason.CANCELLED)
            self._refused.append(Refused(crowding.request.turn, "queue_full", QUEUE_FULL))
            self.scheduler.add(turn)
        if request.grammar is not None:
            self._compiling.add(turn)
        return None

    def take_refusals(self) -> list[Refused]:
        """The turns that were refused after they had been queued, since the last call."""
        refused, self._refused = self._refused, []
        return refused

    def await_tools(self, request: AwaitTools) -> None:
        self.scheduler.await_tools(request.turn, request.tools)

    def warm(self, request: Warm) -> None:
        """A request is announced: bring up what it will need."""
        self.scheduler.prefetcher.add(request)

    def cancel(self, request: Cancel) -> None:
        """Cancel a turn; its KV stays cached."""
        turn = self.scheduler.find(request.turn)
        if turn is not None:
            self._finish(turn, FinishReason.CANCELLED)

    def end(self, tenant: str, session: str) -> None:
        """Cancel the turn of a named session, if there is one."""
        turn = self.scheduler.find_by_session(tenant, session)
        if turn is not None:
            self._finish(turn, FinishReason.CANCELLED)

    def step(self, deliver: Deliver | None = None) -> StepOutputs:
        """Run one step over all runnable turns; returns the outputs since the last call.

        ``deliver`` is called once with the step (None if there was none) and these outputs: on a GPU while the step
        runs, so the outputs are those of the step before; on a CPU after the step.
        """
        step = self.launch()
        if not self.overlaps:
            self.complete(step)
        outputs = self.take_outputs()
        if deliver is not None:
            deliver(step, outputs)
        if self.overlaps:
            self.complete(step)
        return outputs

    def launch(self) -> LaunchedStep | None:
        """Begin a step over all runnable turns; None if there are none, or if it failed. A step must be completed
        before the next one begins.
        """
        if self._compiling:
            for turn, error in self._compiling.poll():
                self._refuse_grammar(turn, error)
        if self._speculator is not None:
            self._speculator.poll(idle=not len(self.scheduler))
        if self._encoder is not None:
            decodes = any(turn.generated for turn in self.scheduler.running)
            self._encoder.encode_next(self.scheduler.next_fed, decodes)
        plan = self.scheduler.schedule()
        self.stalled = not plan
        if not plan:
            self._end_cornered()
            return None
        self._counters.steps += 1
        for turn, _ in plan:
            self._announce(turn)
        try:
            drafts = self._draft(plan)
            started = time.perf_counter()
            return self._run(plan, drafts, started)
        except Exception as error:  # out of memory, or a bug in a model: these turns end, the engine goes on
            self._fail_step(plan, error)
        return None

    def complete(self, step: LaunchedStep | None) -> None:
        """Process the tokens that a step has drawn. Turns that have ended meanwhile are skipped."""
        if step is None:
            return
        try:
            step.done.wait()
            prompt_outputs = [(turn, first, report.read()) for turn, first, report in step.prompt_outputs]
            drawn = step.drawn.read() if step.drawn is not None else []
        except Exception as error:
            self._fail_step(step.plan, error)
            return
        self._failures = 0
        seconds = time.perf_counter() - step.started
        self.scheduler.spare_time.record(step.plan, seconds)
        if (archive := self.scheduler.store.archive) is not None:
            archive.restore_rates.record_step([count for _, count in step.plan], seconds)
        for turn, first, sampled_prompt in prompt_outputs:
            if turn.finish_reason is None:
                self._report_prompt_logprobs(turn, first, sampled_prompt)
        for turn in step.ended:
            if turn.finish_reason is None:
                self._finish(turn, FinishReason.LENGTH)
        for turn, sampled in zip(step.drawing, drawn, strict=True):
            if turn.finish_reason is None:
                self._commit(turn, sampled)
        try:
            self._verify(step)
        except Exception as error:
            self._fail_step(step.plan, error)
            return
        if self._speculator is not None and all(count == 1 for _, count in step.plan):
            fed = len(step.plan) + sum(len(rows.draft.ids) for rows in step.drafted)
            self._speculator.costs.record(fed, time.perf_counter() - step.started)

    def take_outputs(self) -> StepOutputs:
        """The deltas since the last call, and the current statistics."""
        deltas, broken = self._outputs.take()
        for turn in broken:  # also one that is in a step that has been launched
            if turn.finish_reason is None:
                self.scheduler.finish(turn, FinishReason.ERROR)
        return StepOutputs(tuple(deltas), self._recent.read(self.scheduler, self.stalled), time.monotonic())

    def _fail_step(self, plan: list[tuple[Turn, int]], error: Exception) -> None:
        """End the turns of a step that failed. Raises ``error`` if too many steps in a row have failed, or if the
        device or a rank is lost: then a new process is needed.
        """
        log.error("a step of %d turns failed", len(plan), exc_info=error)
        self._failures += 1
        if self._failures >= _MAX_FAILURES or isinstance(error, (torch.AcceleratorError, RankLost)):
            raise error
        for turn, _ in plan:
            if turn.session is not None and self.scheduler.store.stateful:
                self.scheduler.store.invalidate(turn.session)  # some of its layers may be a step ahead
            self._fail(turn, "the model failed on this request")

    def stop(self) -> StepOutputs:
        """End every turn as cancelled."""
        for turn in [*self.scheduler.running, *self.scheduler.waiting]:
            self._finish(turn, FinishReason.CANCELLED)
        if self._speculator is not None:
            self._speculator.poll(idle=True)
        return self.take_outputs()

    def stats(self) -> Stats:
        return read_stats(self._counters, self.scheduler, self._speculator, self.media_store)

    def check_integrity(self) -> None:
        """Assert every invariant that can be checked between steps."""
        self.scheduler.check_integrity()
        self.scheduler.store.residency.check_integrity()

    def _refuse_grammar(self, turn: Turn, error: BaseException) -> None:
        """Refuse a turn whose grammar cannot be compiled, or allows no continuation; also after its first tokens."""
        log.info("turn %s has no grammar: %s", turn.request.turn, error)
        self.scheduler.finish(turn, FinishReason.ERROR)
        message = str(error) if isinstance(error, GrammarError) else "The grammar cannot be compiled."
        self._refused.append(Refused(turn.request.turn, "invalid_grammar", message))

    # -- one step ---------------------------------------------------------------------------------------------------

    def _draft(self, plan: list[tuple[Turn, int]]) -> dict[Turn, Draft]:
        """Tokens to feed behind the pending ones of a plan, as far as there is room for them."""
        if self._speculator is None:
            return {}
        drafts = reserve_drafts(self.scheduler.store, self._speculator.draft(plan, self.scheduler.spare_tokens(plan)))
        self._speculator.begin(plan, drafts)
        return drafts

    def _run(self, plan: list[tuple[Turn, int]], drafts: dict[Turn, Draft], started: float) -> LaunchedStep:
        """Feed the plan with the drafts, and draw the tokens behind the pending ones."""
        rows = StepRows.of(plan, drafts)
        logits, after = feed(self._runner, plan, drafts, rows)
        drafted = [DraftedRows(turn, draft, rows.drafts[turn], after[turn]) for turn, draft in drafts.items()]
        for turn, _ in plan:
            if turn.session is not None and turn.session.length == turn.prompt_length - 1:
                turn.session.checkpoint()
        prompt_outputs = [prompt_logprobs(turn, logits[first : first + count]) for turn, first, count in rows.prompts]
        for turn, _ in rows.last:
            if turn.generated == 0 and turn.session is not None:
                self.scheduler.store.publish(turn.session)
        ended = [turn for turn, _ in rows.last if turn.limit == 0]
        drawing = [(turn, at) for turn, at in rows.last if turn.limit != 0]
        turns, drawn = [turn for turn, _ in drawing], None
        if drawing:
            chosen = [at for _, at in drawing]
            wanted = logits if len(chosen) == len(logits) else logits[put(np.array(chosen), logits.device)]
            drawn = self._sampler.draw(wanted, turns)
        done = HostCopy(logits[:0])
        kept = logits if drafted else None
        return LaunchedStep(
            plan, started, time.perf_counter(), prompt_outputs, ended, turns, drawn, done, drafted, kept
        )

    def _verify(self, step: LaunchedStep) -> None:
        """Draw behind each drafted token that turned out to be right, one after the other, as steps of their own would
        have done: with the turn's own random numbers, penalties, grammar and stop conditions as they are by then.
        """
        agreeing = step.drafted
        while agreeing := [rows for rows in agreeing if rows.agrees()]:
            assert step.logits is not None
            chosen = put(np.array([rows.first + rows.accepted - 1 for rows in agreeing]), step.logits.device)
            drawn = self._sampler.draw(step.logits[chosen], [rows.turn for rows in agreeing]).read()
            for rows, sampled in zip(agreeing, drawn, strict=True):
                self._commit(rows.turn, sampled)
        if self._speculator is not None:
            for rows in step.drafted:
                self._speculator.learn(rows.turn, rows.draft, rows.accepted)
            self._speculator.on_verified()

    def _commit(self, turn: Turn, sampled: SampledToken) -> None:
        """A token was drawn: decide whether it ends the turn, before it is ever fed."""
        if not sampled.usable:
            self._fail(turn, "the model gave no usable numbers for this request")
            return
        self._counters.generated_tokens += 1
        try:
            drawn = self._stop_checker.check(turn, sampled)
        except GrammarError as error:
            self._refuse_grammar(turn, error)
            return
        except Exception:
            log.exception("turn %s failed", turn.request.turn)
            self._fail(turn, UNDECODABLE)
            return
        self._outputs.add(turn, drawn)
        if drawn.reason is not None:
            self._index(turn)
            self.scheduler.finish(turn, drawn.reason)

    def _index(self, turn: Turn) -> None:
        """What a turn that ends has said may be drafted for other turns of its tenant."""
        if self._speculator is not None and turn.media is None:
            self._speculator.on_end(turn)

    def _report_prompt_logprobs(self, turn: Turn, first: int, sampled: list[SampledToken]) -> None:
        """Add what ``prompt_logprobs`` has found; sent once the prompt is whole."""
        if first == 0:  # also where a preempted turn begins again
            text, data = self._vocabulary.spell(turn.ids[0])
            turn.prompt_logprobs = [TokenLogprob(turn.ids[0], text, data, None)]
        turn.prompt_logprobs.extend(self._stop_checker.spell_logprobs(item) for item in sampled)
        if turn.session is not None and turn.session.length == turn.prompt_length:
            self._outputs.add(turn, Delta(turn.request.turn, prompt_logprobs=tuple(turn.prompt_logprobs)))

    # -- beginnings and ends ----------------------------------------------------------------------------------------

    def _end_cornered(self) -> None:
        """A side call that has no room beside its conversation has come to the end of its context."""
        if (turn := self.scheduler.take_cornered()) is not None:
            self._announce(turn)
            self._finish(turn, FinishReason.LENGTH)

    def _announce(self, turn: Turn) -> None:
        """Tell the server once that a turn runs, and what its prompt cost."""
        if turn.receipt is not None and not turn.announced:
            turn.announced = True
            if self._encoder is not None:
                self._encoder.keep(turn)
            self._counters.prompt_tokens += turn.receipt.prompt
            self._counters.cached_tokens += turn.receipt.cached
            self._outputs.add(turn, Delta(turn.request.turn, receipt=turn.receipt))

    def _finish(self, turn: Turn, reason: FinishReason, error: str | None = None) -> None:
        self._index(turn)
        self.scheduler.finish(turn, reason)
        self._outputs.add(turn, turn.last_delta(reason, error))

    def _fail(self, turn: Turn, message: str) -> None:
        if turn.finish_reason is None:
            self._finish(turn, FinishReason.ERROR, message)
