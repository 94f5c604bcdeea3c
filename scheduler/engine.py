"""The engine: one loop that admits, steps and delivers. The only code that touches tensors while serving.

Order of side effects in a step: schedule (pages, receipts) -> forward (lengths grow) -> sample -> per turn:
append the token, decode its text, decide whether it ends the turn -> one message. A stop is therefore decided
on a token that has not been fed.
"""

from __future__ import annotations

import logging
import os
import time
from array import array
from concurrent.futures import Future

import numpy as np
import torch
from llguidance import LLMatcher

from cache.ranks import RankLost
from cache.stream import put
from scheduler.constraint import Broken, Grammars
from scheduler.messages import (
    QUEUE_FULL,
    Cancel,
    Delta,
    FinishReason,
    Refused,
    Stats,
    StepOutputs,
    Submit,
    TokenLogprob,
    unpack_ids,
)
from scheduler.queue import QueueFull
from scheduler.runner import ModelRunner
from scheduler.sampling import Sampled, Sampler, report
from scheduler.scheduler import Scheduler
from scheduler.text import TextStream, Vocabulary
from scheduler.turn import Turn

log = logging.getLogger("warmturn.engine")

_HOPELESS = 8  # failed steps in a row after which the engine gives up
_TELLING = 32  # prompt tokens in a step that make its time a measure of prefill


class Limits:
    """What a turn may ask for: ``context`` tokens in all, ids below ``vocab``.

    ``start`` is what the decoder of an encoder-decoder model begins with: then prompt and reply have a context each.
    """

    def __init__(self, context: int, vocab: int, start: tuple[int, ...] = ()) -> None:
        self.context = context
        self.vocab = vocab
        self.start = start


class Engine:
    """Turns in, deltas out. ``submit``, ``cancel`` and ``end`` between steps; ``step`` runs the model once."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        vocabulary: Vocabulary,
        ends: tuple[int, ...],
        limits: Limits,
        grammars: Grammars,
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._vocabulary = vocabulary
        self._ends = frozenset(ends)
        self._limits = limits
        self._grammars = grammars
        self._sampler = Sampler(ends)
        self._compiling: list[tuple[Turn, Future[LLMatcher]]] = []  # waiting turns whose grammars are not ready
        self._refused: list[Refused] = []
        self._deltas: list[Delta] = []
        self._failures = 0  # steps in a row
        self.stalled = False  # the last step had nothing that could run
        self._steps = self._prompt = self._cached = self._generated = 0
        self._pid = os.getpid()

    @property
    def idle(self) -> bool:
        """Nothing to run."""
        return not len(self.scheduler)

    def submit(self, request: Submit) -> Refused | None:
        """Line a turn up, or say why not."""
        ids = unpack_ids(request.prompt)
        refused = self._refuse(request, ids)
        if refused is not None:
            return refused
        start = self._limits.start
        text = TextStream(self._vocabulary, start or ids, request.stopping.stop, request.special)
        turn = Turn(request, text, start)
        try:
            self.scheduler.add(turn)
        except QueueFull:
            crowding = self.scheduler.waiting.crowding(request.tenant)
            if crowding is None:
                return Refused(request.turn, "queue_full", QUEUE_FULL)
            self.scheduler.finish(crowding, FinishReason.CANCELLED)
            self._refused.append(Refused(crowding.request.turn, "queue_full", QUEUE_FULL))
            self.scheduler.add(turn)
        if request.grammar is not None:
            turn.compiling = True
            self._compiling.append((turn, self._grammars.ask(request.grammar)))
        return None

    def refusals(self) -> list[Refused]:
        """The turns that have been refused since they were lined up, told once."""
        refused, self._refused = self._refused, []
        return refused

    def cancel(self, request: Cancel) -> None:
        """Take a turn out of the batch at once; its KV stays."""
        turn = self.scheduler.find(request.turn)
        if turn is not None:
            self._finish(turn, FinishReason.CANCELLED)

    def end(self, tenant: str, session: str) -> None:
        """End the turn of a named session, if there is one."""
        turn = self.scheduler.of_session(tenant, session)
        if turn is not None:
            self._finish(turn, FinishReason.CANCELLED)

    def step(self) -> StepOutputs:
        """Run one step over whatever is runnable; all the news since the last one."""
        if self._compiling:
            self._compiled()
        plan = self.scheduler.schedule()
        if plan:
            self._steps += 1
            for turn, _ in plan:
                self._admitted(turn)
            started = time.perf_counter()
            try:
                self._run(plan)
                self._failures = 0
                self._measure(plan, time.perf_counter() - started)
            except Exception as error:  # out of memory, or a bug in a model: these turns end, the engine goes on
                self._survive(plan, error)
        self.stalled = not plan
        deltas, self._deltas = tuple(self._deltas), []
        return StepOutputs(deltas, self.stats())

    def _measure(self, plan: list[tuple[Turn, int]], seconds: float) -> None:
        """What a prompt token costs, for the choice between loading and computing."""
        archive, fed = self.scheduler.store.archive, sum(count for _, count in plan)
        prefill = sum(count for _, count in plan if count > 1)
        if archive is not None and prefill >= _TELLING and 2 * prefill > fed:
            archive.pace.computed(fed, seconds)

    def _survive(self, plan: list[tuple[Turn, int]], error: Exception) -> None:
        """A step failed: its turns end. Where no step succeeds any more the device is lost, and a fresh
        process the cure.
        """
        log.error("a step of %d turns failed", len(plan), exc_info=error)
        self._failures += 1
        if self._failures >= _HOPELESS or isinstance(error, (torch.AcceleratorError, RankLost)):
            raise error
        for turn, _ in plan:
            if turn.session is not None and self.scheduler.store.stateful:
                self.scheduler.store.spoil(turn.session)  # some of its layers may be a step ahead
            self._fail(turn, "the model failed on this request")

    def stop(self) -> StepOutputs:
        """End every turn as cancelled."""
        for turn in [*self.scheduler.running, *self.scheduler.waiting]:
            self._finish(turn, FinishReason.CANCELLED)
        deltas, self._deltas = tuple(self._deltas), []
        return StepOutputs(deltas, self.stats())

    def stats(self) -> Stats:
        """Gauges and counters."""
        scheduler, pool = self.scheduler, self.scheduler.store.pool
        return Stats(
            pid=self._pid,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            sessions=len(scheduler.store),
            pages_device=pool.device.used,
            pages_device_total=pool.device.slots,
            pages_host=pool.host.used,
            pages_host_total=pool.host.slots,
            prompt_tokens=self._prompt,
            cached_tokens=self._cached,
            generated_tokens=self._generated,
            steps=self._steps,
            preemptions=scheduler.preemptions,
            evictions=scheduler.store.evictions,
            host_evictions=scheduler.store.host_evictions,
            misses={str(reason): count for reason, count in scheduler.misses.items()},
            **self._below(),
        )

    def _below(self) -> dict[str, int]:
        """The gauges and counters of the tiers below memory."""
        archive = self.scheduler.store.archive
        if archive is None:
            return {}
        remote = archive.courier.remote if archive.courier is not None else None
        return {
            "disk_bytes": archive.disk.used,
            "disk_bytes_total": archive.disk.budget,
            "disk_sessions": len(archive.disk.heads),
            "disk_evictions": archive.disk.evictions,
            "disk_saves": archive.saver.saves,
            "disk_written": archive.saver.written,
            "disk_read": archive.loader.read,
            "disk_errors": archive.errors,
            "disk_damaged": archive.disk.damaged,
            "disk_pending": archive.saver.pending,
            "remote_bytes": remote.used if remote is not None else 0,
            "remote_bytes_total": archive.courier.budget if archive.courier is not None else 0,
        }

    def check_integrity(self) -> None:
        """Assert every invariant that can be checked between steps."""
        self.scheduler.check_integrity()
        self.scheduler.store.check_integrity()

    def _compiled(self) -> None:
        """Turns whose grammars are ready may be admitted now, or are refused where these are none."""
        still = []
        for turn, future in self._compiling:
            if turn.finish_reason is not None:  # cancelled meanwhile
                continue
            if not future.done():
                still.append((turn, future))
            elif (error := future.exception()) is not None:
                log.info("turn %s has no grammar: %r", turn.request.turn, error)
                self.scheduler.finish(turn, FinishReason.ERROR)
                message = str(error) if isinstance(error, Broken) else "The grammar cannot be compiled."
                self._refused.append(Refused(turn.request.turn, "invalid_grammar", message))
            else:
                turn.compiling, turn.constraint = False, self._grammars.constraint(future.result())
        self._compiling = still

    # -- one step ---------------------------------------------------------------------------------------------------

    def _run(self, plan: list[tuple[Turn, int]]) -> None:
        rows: list[int] = []
        sampling: list[tuple[Turn, int]] = []
        asked: list[tuple[Turn, int, int]] = []
        row = 0
        for turn, count in plan:
            last = turn.owes == count
            if turn.request.prompt_logprobs is not None and turn.generated == 0:
                asked.append((turn, len(rows), count))
                rows.extend(range(row, row + count))
            elif last and turn.limit != 0:
                rows.append(row + count - 1)
            if last:
                sampling.append((turn, len(rows) - 1))
            row += count
        work = [(turn.session, count) for turn, count in plan if turn.session is not None]
        logits = self._runner.run(work, rows)
        for turn, _ in plan:
            if turn.session is not None and turn.session.length == turn.prompt_length - 1:
                turn.session.checkpoint()
        for turn, first, count in asked:
            self._report_prompt(turn, logits[first : first + count])
        for turn, _ in sampling:
            if turn.generated == 0 and turn.session is not None:
                self.scheduler.store.publish(turn.session)
        ended = [turn for turn, _ in sampling if turn.limit == 0]
        for turn in ended:
            self._finish(turn, FinishReason.LENGTH)
        drawing = [(turn, at) for turn, at in sampling if turn.limit != 0]
        if drawing:
            chosen = [at for _, at in drawing]
            drawn = self._sampler.sample(
                logits if len(chosen) == len(logits) else logits[put(np.array(chosen), logits.device)],
                [turn for turn, _ in drawing],
            )
            for (turn, _), sampled in zip(drawing, drawn, strict=True):
                if sampled.usable:
                    self._commit(turn, sampled)
                else:
                    self._fail(turn, "the model gave no usable numbers for this request")

    def _commit(self, turn: Turn, sampled: Sampled) -> None:
        """A token was drawn: show its text and decide whether it ends the turn, before it is ever fed."""
        self._generated += 1
        try:
            turn.append(sampled.token)
            complete = turn.constraint is not None and turn.constraint.accept(sampled.token)
            text, reason, stop = self._judge(turn, sampled.token, complete)
            logprobs = (self._spelled(sampled),) if sampled.logprob is not None else ()
        except Exception as error:
            log.exception("turn %s failed", turn.request.turn)
            self._fail(turn, str(error) if isinstance(error, Broken) else "the reply could not be decoded")
            return
        if reason is None:
            self._deltas.append(Delta(turn.request.turn, (sampled.token,), text, logprobs=logprobs))
        else:
            self._finish(turn, reason, tokens=(sampled.token,), text=text, stop=stop, logprobs=logprobs)

    def _judge(self, turn: Turn, token: int, complete: bool) -> tuple[str, FinishReason | None, str | int | None]:
        """The text that the token releases, why it ends the turn if it does, and what matched. ``complete``: the turn's
        grammar admits nothing but its end now.
        """
        stopping = turn.request.stopping
        free = turn.generated > stopping.min_tokens
        if free and token in stopping.stop_token_ids:
            return turn.text.flush(), FinishReason.STOP, token
        if token in self._ends and (turn.constraint is not None or (free and not stopping.ignore_eos)):
            return turn.text.flush(), FinishReason.STOP, None
        text = turn.text.push(token, may_stop=turn.generated >= stopping.min_tokens)
        if turn.text.stopped is not None:
            return text, FinishReason.STOP, turn.text.stopped
        if complete:
            return text + turn.text.flush(), FinishReason.STOP, None
        full = len(turn.ids) >= self._limits.context
        if full or (turn.limit is not None and turn.generated >= turn.limit):
            return text + turn.text.flush(), FinishReason.LENGTH, None
        return text, None, None

    def _report_prompt(self, turn: Turn, logits: torch.Tensor) -> None:
        """Log-probabilities of the prompt tokens that these rows ``[count, V]`` predict."""
        assert turn.session is not None
        first = turn.session.length - logits.shape[0]
        targets = turn.ids[first + 1 : turn.session.length + 1]
        sampled = report(logits[: len(targets)], targets, [turn.request.prompt_logprobs] * len(targets))
        if first == 0:  # also where a preempted turn begins again
            text, data = self._vocabulary.spell(turn.ids[0])
            turn.prompt_logprobs = [TokenLogprob(turn.ids[0], text, data, None)]
        turn.prompt_logprobs.extend(self._spelled(item) for item in sampled)
        if turn.session.length == turn.prompt_length:
            self._deltas.append(Delta(turn.request.turn, prompt_logprobs=tuple(turn.prompt_logprobs)))

    # -- beginnings and ends ----------------------------------------------------------------------------------------

    def _admitted(self, turn: Turn) -> None:
        """Tell the server once that a turn runs, and what its prompt cost."""
        if turn.receipt is not None and not turn.announced:
            turn.announced = True
            self._prompt += turn.receipt.prompt
            self._cached += turn.receipt.cached
            self._deltas.append(Delta(turn.request.turn, receipt=turn.receipt))

    def _finish(
        self,
        turn: Turn,
        reason: FinishReason,
        *,
        tokens: tuple[int, ...] = (),
        text: str = "",
        stop: str | int | None = None,
        logprobs: tuple[TokenLogprob, ...] = (),
        error: str | None = None,
    ) -> None:
        self.scheduler.finish(turn, reason)
        self._deltas.append(
            Delta(turn.request.turn, tokens, text, finish_reason=reason, stop=stop, logprobs=logprobs, error=error)
        )

    def _fail(self, turn: Turn, message: str) -> None:
        if turn.finish_reason is None:
            self._finish(turn, FinishReason.ERROR, error=message)

    def _refuse(self, request: Submit, ids: array[int]) -> Refused | None:
        if self.scheduler.find(request.turn) is not None:
            return Refused(request.turn, "invalid_prompt", "A turn of this id is running.")
        if any(not 0 <= token < self._limits.vocab for token in request.sampling.logit_bias):
            return Refused(request.turn, "invalid_prompt", "logit_bias holds a token id that is not in the vocabulary.")
        if not ids:
            return Refused(request.turn, "invalid_prompt", "The prompt is empty.")
        if min(ids) < 0 or max(ids) >= self._limits.vocab:
            return Refused(request.turn, "invalid_prompt", "The prompt holds a token id that is not in the vocabulary.")
        start = self._limits.start
        if start and request.prompt_logprobs is not None:
            return Refused(request.turn, "invalid_prompt", "An encoder gives its prompt no log-probabilities.")
        limit = request.stopping.max_tokens
        wanted = len(start or ids) + (1 if limit is None else limit)
        if max(wanted, len(ids)) > self._limits.context:
            return Refused(
                request.turn,
                "context_length_exceeded",
                f"The context is {self._limits.context} tokens; {max(wanted, len(ids))} were asked for.",
            )
        if request.salt and request.session is not None:  # whoever forgets the session would not find it
            return Refused(request.turn, "invalid_prompt", "A turn of a session has no salt.")
        if self.scheduler.busy(request.tenant, request.session):
            return Refused(request.turn, "session_busy", "A turn of this session is running.")
        return None

    def _spelled(self, sampled: Sampled) -> TokenLogprob:
        text, data = self._vocabulary.spell(sampled.token)
        top = tuple((token, *self._vocabulary.spell(token), logprob) for token, logprob in sampled.top)
        return TokenLogprob(sampled.token, text, data, sampled.logprob, top)
