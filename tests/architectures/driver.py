"""The product's engine driven from outside, turn by turn, every distribution asked for in full."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from engine_kit import Outcome

from cache.tier import Tier
from scheduler.engine_assembly import build_engine
from scheduler.engine_config import EngineConfig
from scheduler.model.loader import LoadedModel
from scheduler.model.memory import TooSmall
from scheduler.protocol import FinishReason, Submit, TokenLogprob, pack_ids
from scheduler.sampling_params import Sampling, Stopping

ROOMY = 32 << 20  # bytes of KV
TENANT = "a"
_STEP_LIMIT = 2_000
_BANNED = -1e4


class TurnFailed(Exception):
    """A turn did not end as it should have: nothing was answered wrong, but nothing right either."""


@dataclass(frozen=True)
class Reply:
    """A finished turn: what was fed, what came, and the log-probabilities ``[len(tokens), V]`` it was drawn from.

    ``read`` are those after each prompt token but the last, where they were asked for. ``cached`` tokens of the prompt
    were reused, ``restored`` of them from the host.
    """

    prompt: list[int]
    tokens: list[int]
    drawn: torch.Tensor
    read: torch.Tensor | None
    cached: int
    restored: int


class Driver:
    """One engine: ``send`` turns, ``step`` or ``run``, then take each one's ``reply``; all greedy.

    ``banned`` tokens are never generated (models treat some ids differently).
    """

    def __init__(
        self,
        loaded: LoadedModel,
        banned: set[int],
        *,
        kv_memory: int = ROOMY,
        host_memory: int = 0,
        step_tokens: int = 16,
        folder: str | None = None,
    ) -> None:
        config = EngineConfig(
            address="",
            model="",
            kv_memory=kv_memory,
            host_memory=host_memory,
            max_step_tokens=step_tokens,
            kv_folder=folder,
            disk_floor=0,
        )
        self.engine, self.facts = build_engine(config, loaded)
        self._sampling = Sampling(temperature=0.0, logit_bias=dict.fromkeys(sorted(banned), _BANNED))
        self._prompts: dict[str, list[int]] = {}
        self._outcomes: defaultdict[str, Outcome] = defaultdict(Outcome)

    def send(
        self,
        prompt: list[int],
        count: int,
        session: str | None = None,
        *,
        read: bool = False,
        media: tuple[str, ...] = (),
    ) -> str:
        """Submit a turn of ``count`` tokens; returns its id. ``read``: also report on the prompt."""
        turn = f"t{len(self._prompts)}"
        self._prompts[turn] = prompt
        width = self.facts.vocab_size
        stopping = Stopping(max_tokens=count, ignore_eos=True)
        request = Submit(
            turn,
            TENANT,
            pack_ids(prompt),
            session,
            self._sampling,
            stopping,
            width,
            width if read else None,
            media=media,
        )
        refused = self.engine.submit(request)
        if refused is not None:
            raise TurnFailed(f"refused: {refused.code}")
        return turn

    def step(self, times: int = 1) -> None:
        """Steps, each followed by the integrity checks."""
        for _ in range(times):
            for delta in self.engine.step().deltas:
                self._outcomes[delta.turn].add(delta)
            self.engine.check_integrity()

    def run(self) -> None:
        """Step until nothing is left."""
        with _loud_errors() as errors:
            for _ in range(_STEP_LIMIT):
                if self.engine.idle:
                    break
                self.step()
                if self.engine.stalled:
                    time.sleep(0.001)  # something is being read from disk
        if errors:
            raise TurnFailed(errors[0])
        if not self.engine.idle:
            raise TurnFailed("the engine does not come to an end")

    def ask(self, prompt: list[int], count: int, session: str | None = None, **options: Any) -> Reply:
        """One turn from beginning to end; ``options`` are those of ``send``."""
        turn = self.send(prompt, count, session, **options)
        self.run()
        return self.reply(turn)

    def leave(self) -> bool:
        """Write all that is to be kept; False where nothing is kept between turns."""
        archive = self.engine.scheduler.store.archive
        if archive is not None:
            archive.flush(60.0)
            archive.close()
        return archive is not None

    def reply(self, turn: str) -> Reply:
        outcome = self._outcomes[turn]
        if outcome.finish_reason is not FinishReason.LENGTH or not outcome.admitted:
            raise TurnFailed(f"ended as {outcome.finish_reason}")
        drawn = [entry for delta in outcome.deltas for entry in delta.logprobs]
        read = [entry for delta in outcome.deltas for entry in delta.prompt_logprobs]
        receipt = outcome.receipt
        return Reply(
            self._prompts[turn],
            outcome.tokens,
            _distributions(drawn),
            _distributions(read[1:]) if read else None,
            receipt.cached,
            receipt.count_reused(Tier.HOST),
        )


def smallest(loaded: LoadedModel, banned: set[int], context: int, host_memory: int = 0) -> Driver | None:
    """An engine with hardly more KV memory than a turn of ``context`` tokens needs; None if there is no such limit."""
    budget = 1024.0
    while budget <= ROOMY:
        try:
            driver = Driver(loaded, banned, kv_memory=int(budget), host_memory=host_memory)
        except TooSmall:
            driver = None
        if driver is not None and driver.facts.max_context >= context:
            return driver
        budget *= 1.25
    return None


def _distributions(entries: list[TokenLogprob]) -> torch.Tensor:
    """``[len(entries), V]`` log-probabilities, by token id."""
    rows: list[dict[int, Any]] = [{token: logprob for token, _, _, logprob in entry.top} for entry in entries]
    width = max((max(row) + 1 for row in rows), default=0)
    out = torch.full((len(rows), width), float("-inf"))
    for at, row in enumerate(rows):
        out[at, list(row)] = torch.tensor(list(row.values()))
    return out


@contextmanager
def _loud_errors() -> Iterator[list[str]]:
    """The engine logs an exception within a step and ends the turns; here its text is wanted."""
    found: list[str] = []
    logger = logging.getLogger("warmturn.engine")
    handler = logging.Handler()

    def emit(record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        found.append(f"{type(error).__name__}: {error}" if error else record.getMessage())

    handler.emit = emit  # type: ignore[method-assign]
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
