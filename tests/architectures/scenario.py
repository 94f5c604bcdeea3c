"""What every architecture must get right, each check against from-scratch forwards of the same ids.

``check`` never raises for what a model or the product does: it reports.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from architectures.build import family_of
from architectures.driver import Driver, Reply, smallest
from architectures.oracle import Oracle
from architectures.shapes import special_tokens
from tiny_models import CONTEXT, make_tokenizer

from cache.tier import Tier
from scheduler.model.loader import LoadedModel, LoadFailed, prepare

FAST_FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None  # fsync costs nothing there

STRICT, LOOSE = 1e-4, 2e-2


class Status(StrEnum):
    """How a check, and with it an entry, ended; an entry is as bad as its worst check."""

    RIGHT = "right"
    SKIPPED = "skipped"  # does not apply, or there is nothing to call yet
    REFUSED = "refused"  # at load, with a reason
    FAILED = "failed"  # an exception or an error reply: loud
    WRONG = "wrong"  # other tokens or logits than the model's own: silent


_WORSE = list(Status)


@dataclass(frozen=True)
class Check:
    """One check: the worst relative error of its logits, and the part of the repeated prompts that was reused
    (None where nothing could be).
    """

    name: str
    status: Status
    error: float = 0.0
    reused: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """All that was found out about one entry; ``reason`` says why it was refused, or what went wrong first."""

    status: Status
    family: str
    mode: str = ""
    reason: str = ""
    checks: tuple[Check, ...] = ()


class Mismatch(Exception):
    """The product said something else than the model."""


def check(model: Any, tolerance: float = STRICT, kind: type[Scenario] | None = None) -> Report:
    """Drive the product with ``model``; where that is an encoder-decoder, prompts are the encoder's input.

    ``tolerance``: what log-probabilities may differ by, relative to the largest logit. ``kind``: of scenario.
    """
    kind = kind or Scenario
    family = family_of(model)
    try:
        oracle = kind.oracle(copy.deepcopy(model))  # the product may change the one it is given
    except Exception as error:
        oracle, unable = None, _brief(error)
    try:
        tokenizer = make_tokenizer()
        tokenizer.model_max_length = kind.context
        loaded = prepare(model, tokenizer)
    except LoadFailed as error:
        return Report(Status.REFUSED, family, reason=str(error))
    except Exception as error:
        return Report(Status.FAILED, family, reason=f"at load: {_brief(error)}")
    mode = str(loaded.verdict.mode.name)
    if oracle is None:
        return Report(Status.FAILED, family, mode, f"the plain forward fails: {unable}")
    encodes = bool(model.config.is_encoder_decoder)
    scenario = kind(loaded, oracle, tolerance, encodes)
    checks = tuple(scenario.checks())
    worst = max((c for c in checks if c.status is not Status.SKIPPED), key=lambda c: _WORSE.index(c.status))
    reason = f"{worst.name}: {worst.detail}" if worst.status is not Status.RIGHT else ""
    return Report(worst.status, family, scenario.mode, reason, checks)


class Scenario:
    """The checks over one loaded model."""

    oracle = Oracle
    context = CONTEXT  # of a model that names no limit

    def __init__(self, loaded: LoadedModel, oracle: Oracle, tolerance: float, encodes: bool) -> None:
        self._loaded = loaded
        self._oracle = oracle
        self._tolerance = tolerance
        self._encodes = encodes
        self._banned = {t for t in special_tokens(loaded.model.config) if t < _width(loaded.model)}
        self._random = random.Random(0)
        self._errors: list[float] = []
        self._reused: list[float] = []
        self.mode = ""

    def checks(self) -> Iterator[Check]:
        for name, run in self._named().items():
            yield self._checked(name, run)

    def _named(self) -> dict[str, Callable[[], str]]:
        everywhere = {"alone": self.alone, "interleaved": self.interleaved, "eviction": self.eviction}
        timelines = {"resume": self.resume, "edit": self.edit, "fork": self.fork, "restore": self.restore}
        return everywhere if self._encodes else {**everywhere, **timelines}

    # -- the checks -------------------------------------------------------------------------------------------------

    def alone(self) -> str:
        """One session; a prompt in one piece, then one in chunks whose every position is looked at."""
        driver = self._driver(step_tokens=64)
        self._compare(driver.ask(self._text(23), 6))
        if not self._encodes:
            driver = self._driver()
            self._compare(driver.ask(self._text(37), 3, read=True))
        return ""

    def interleaved(self) -> str:
        """Three sessions of different lengths: prefill, chunked prefill and decode in one step."""
        driver = self._driver()
        turns = []
        for length, count in ((7, 9), (41, 6), (19, 7)):
            turns.append(driver.send(self._text(length), count))
            driver.step(2)
        driver.run()
        for turn in turns:
            self._compare(driver.reply(turn))
        return ""

    def resume(self) -> str:
        """Turns two and three of a named session feed several tokens on top of what is cached, among company."""
        driver = self._driver()
        other = driver.send(self._text(11), 24)
        timeline = self._text(21)
        for new, count in ((0, 5), (9, 4), (6, 4)):
            timeline = [*timeline, *self._text(new)]
            reply = driver.ask(timeline, count, "r")
            self._compare(reply)
            self._count_reuse(reply, len(timeline) - new - 1 if new else None)
            timeline = [*timeline, *reply.tokens]
        self._compare(driver.reply(other))
        return ""

    def edit(self) -> str:
        """Earlier messages change: in the last turn, then right at the beginning; the session goes on after each."""
        driver = self._driver()
        first = self._text(18)
        reply = driver.ask(first, 4, "e")
        second = [*first, *reply.tokens, *self._text(8)]
        driver.ask(second, 4, "e")
        for keep, new in ((24, 9), (4, 12)):  # 24: within the second message; states have a checkpoint before it
            timeline = [*second[:keep], *self._text(new)]
            for more in (0, 5):
                timeline = [*timeline, *self._text(more)]
                reply = driver.ask(timeline, 4, "e")
                self._compare(reply)
                self._count_reuse(reply, keep if keep == 24 and not more else None)
                timeline = [*timeline, *reply.tokens]
        return ""

    def fork(self) -> str:
        """Two endings on one trunk, then a trunk that is still being computed when two others want it."""
        driver = self._driver()
        trunk = self._text(25)
        reply = driver.ask(trunk, 4)
        trunk = [*trunk, *reply.tokens]
        turns = [driver.send([*trunk, *self._text(n)], 5) for n in (3, 7)]
        driver.run()
        for turn in turns:
            self._compare(driver.reply(turn))
            self._count_reuse(driver.reply(turn), len(trunk) - 1)
        prompt = self._text(22)
        turns = [driver.send(prompt, 5) for _ in range(3)]
        driver.run()
        for turn in turns:
            self._compare(driver.reply(turn))
        return ""

    def eviction(self) -> str:
        """Three sessions of three turns each where not even two fit: dropped and recomputed, or taken to the host."""
        rounds, evictions = 2 if self._encodes else 3, 0
        for host_memory in (0, 1 << 20):
            driver = smallest(self._loaded, self._banned, 60, host_memory)
            if driver is None:
                return "no small enough memory"
            timelines = {name: self._text(n) for name, n in (("x", 17), ("y", 26), ("z", 9))}
            for _ in range(rounds):
                for name, timeline in timelines.items():
                    reply = driver.ask(timeline, 3, None if self._encodes else name)
                    self._compare(reply)
                    timelines[name] = [*timeline, *reply.tokens, *self._text(5)]
            evictions += driver.engine.stats().tier(Tier.DEVICE).evictions
        return "" if evictions else "nothing was evicted"

    def restore(self) -> str:
        """A session that one engine has written to disk goes on in another."""
        with tempfile.TemporaryDirectory(dir=FAST_FOLDER) as folder:
            driver = self._driver(folder=folder)
            timeline = self._text(24)
            reply = driver.ask(timeline, 5, "s")
            timeline = [*timeline, *reply.tokens]
            if not driver.leave():
                return "nothing is kept between turns"
            other = self._driver(folder=folder)
            timeline = [*timeline, *self._text(6)]
            reply = other.ask(timeline, 4, "s")
            self._compare(reply)
            self._count_reuse(reply, len(timeline) - 7)
        return ""

    # -- around them ------------------------------------------------------------------------------------------------

    def _checked(self, name: str, run: Callable[[], str]) -> Check:
        self._errors, self._reused = [], []
        status, detail = Status.RIGHT, ""
        try:
            detail = run()
        except NotImplementedError:
            status = Status.SKIPPED
        except Mismatch as error:
            status, detail = Status.WRONG, str(error)
        except Exception as error:
            status, detail = Status.FAILED, _brief(error)
        reused = min(self._reused, default=None)
        return Check(name, status, max(self._errors, default=0.0), reused, detail)

    def _driver(self, step_tokens: int = 16, folder: str | None = None) -> Driver:
        driver = Driver(self._loaded, self._banned, step_tokens=step_tokens, folder=folder)
        self.mode = driver.facts.mode
        return driver

    def _text(self, length: int) -> list[int]:
        """Random token ids without a special meaning."""
        plain = [token for token in range(16, 200) if token not in self._banned]
        return [self._random.choice(plain) for _ in range(length)]

    def _count_reuse(self, reply: Reply, reusable: int | None) -> None:
        if reusable:
            self._reused.append(min(reply.cached / reusable, 1.0))

    def _compare(self, reply: Reply) -> None:
        """Every distribution and every greedy choice of a reply."""
        logits = self._oracle.logits(reply.prompt, reply.tokens)
        self._near(reply.drawn, logits, f"after {len(reply.prompt)} tokens of which {reply.cached} were reused")
        free = logits.clone()
        free[:, [t for t in self._banned if t < logits.shape[1]]] = float("-inf")
        chosen = free.gather(1, torch.tensor(reply.tokens)[:, None])[:, 0]
        margin = free.max(-1).values - chosen  # an exact tie may fall either way
        if bool((margin > self._tolerance * _scale(logits)).any()):
            raise Mismatch(f"other tokens than greedy ones after {len(reply.prompt)} tokens")
        if reply.read is not None:
            self._near(reply.read, self._oracle.logits(reply.prompt[:1], reply.prompt[1:]), "within the prompt")

    def _near(self, got: torch.Tensor, logits: torch.Tensor, where: str) -> None:
        """Log-probabilities against logits, relative to the largest logit."""
        want = torch.log_softmax(logits, -1)
        if got.shape != want.shape:
            raise Mismatch(f"{tuple(got.shape)} log-probabilities, not {tuple(want.shape)}, {where}")
        possible = logits > -1e4  # some models forbid tokens outright
        error = float(((got - want).abs()[possible]).max() / _scale(logits))
        self._errors.append(error)
        if not error <= self._tolerance:
            raise Mismatch(f"logits differ by {error:.1e} {where}")


def _scale(logits: torch.Tensor) -> torch.Tensor:
    return logits[logits > -1e4].abs().max()


def _width(model: Any) -> int:
    vocab = getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    return int(vocab) if isinstance(vocab, int) else 1 << 30


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
