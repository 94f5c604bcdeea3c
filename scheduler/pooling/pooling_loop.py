"""``PoolingLoop``: the engine of a model that embeds or scores, from message to message."""

from __future__ import annotations

import logging
import os
import time

import torch

from scheduler.engine_stats import Stats
from scheduler.pooling.pooler import Pooler
from scheduler.pooling.pooling_queue import PoolingQueue, PoolingRequest, tokens_of
from scheduler.pooling_messages import Pool, Pooled
from scheduler.protocol import QUEUE_FULL, Cancel, Shutdown, StepOutputs, ToEngine
from scheduler.sessionless import HEARTBEAT, MessageChannel, answer_without_sessions

log = logging.getLogger("warmturn.engine")

MAX_FAILURES = 8  # failed steps in a row after which the engine gives up
FAILED = "The model failed on this request."
NO_TEXT = "This model generates no text."


class PoolingLoop:
    """Takes requests between steps; a step embeds or scores inputs of several requests, up to ``step_tokens`` tokens.
    What the server asks of sessions is answered as by an engine that has none.
    """

    def __init__(self, pooler: Pooler, channel: MessageChannel, max_queued: int, step_tokens: int) -> None:
        self._pooler, self._channel, self._step_tokens = pooler, channel, step_tokens
        self._queue = PoolingQueue(max_queued)
        self._done, self._tokens, self._steps, self._failures = 0, 0, 0, 0
        self._sent_at = 0.0
        self._over = False

    def run(self) -> None:
        """Serve until the server ends it."""
        while not self._over:
            for message in self._channel.receive(0 if len(self._queue) else int(1000 * HEARTBEAT)):
                self._take(message)
            stepped = self._step()
            if stepped or time.monotonic() - self._sent_at >= 0.9 * HEARTBEAT:
                self._channel.send(StepOutputs((), self.stats()))
                self._sent_at = time.monotonic()

    def stats(self) -> Stats:
        """What waits, and what was done."""
        return Stats(
            pid=os.getpid(),
            waiting=len(self._queue),
            prompt_tokens=self._tokens,
            steps=self._steps,
            pooled=self._done,
        )

    def _step(self) -> bool:
        """Compute what the queue has next; False if nothing waits."""
        step = self._queue.take(self._step_tokens)
        if not step:
            return False
        self._steps += 1
        inputs = [request.message.inputs[place] for request, place in step]
        for group in self._pooler.groups([tokens_of(one) for one in inputs]):
            self._compute([step[number] for number in group])
        return True

    def _compute(self, group: list[tuple[PoolingRequest, int]]) -> None:
        """One forward. Where it fails, each of its requests is tried alone: none fails for another one."""
        inputs = [request.message.inputs[place] for request, place in group]
        names = {request.message.request for request, _ in group}
        try:
            vectors = self._pooler.run(inputs)
        except Exception as error:  # out of memory, or a bug in a model
            if len(names) > 1 and not isinstance(error, torch.AcceleratorError):
                for name in sorted(names):
                    self._compute([pair for pair in group if pair[0].message.request == name])
                return
            self._failures += 1
            log.error("a step of %d inputs failed", len(group), exc_info=error)
            if self._failures >= MAX_FAILURES or isinstance(error, torch.AcceleratorError):
                raise
            for name in names:
                self._queue.drop(name)
                self._channel.send(Pooled(name, code="engine_error", error=FAILED))
            return
        self._failures = 0
        self._done += len(group)
        self._tokens += sum(map(tokens_of, inputs))
        for (request, place), vector in zip(group, vectors, strict=True):
            request.keep(place, vector)
            if not request.missing:
                self._answer(request)

    def _answer(self, request: PoolingRequest) -> None:
        """All vectors of a request are there."""
        self._queue.drop(request.message.request)
        whole = torch.stack([row for row in request.rows if row is not None]).contiguous()
        self._channel.send(Pooled(request.message.request, whole.numpy().astype("<f4", copy=False).tobytes()))

    def _take(self, message: ToEngine) -> None:
        """Do what the server has asked for."""
        match message:
            case Pool():
                if not self._queue.add(message):
                    self._channel.send(Pooled(message.request, code="queue_full", error=QUEUE_FULL))
            case Cancel():
                self._queue.drop(message.turn)
            case Shutdown():
                self._over = True
            case _:
                if (answer := answer_without_sessions(message, NO_TEXT)) is not None:
                    self._channel.send(answer)
