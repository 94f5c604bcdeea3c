"""Sessions that grow past the thresholds of their model, as large as they really are, while others share the steps."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from architectures.driver import Driver, Reply
from architectures.oracle import Oracle
from architectures.scenario import FAST_FOLDER, Mismatch, Scenario
from architectures.shapes import BEYOND, thresholds

_BEFORE = 6  # tokens short of it when decoding begins
_CROSSING = 12  # tokens decoded across it
_LAST = 4  # tokens decoded later on
_OTHER = 40  # tokens of the sessions that share the steps
_STEP = 1024  # tokens
_KV = 192 << 20  # bytes
_TEXTS = 3


class TwoAnswers(Exception):
    """The model itself says one thing or another of this text, as roundings fall."""


class Remembering(Oracle):
    """An oracle that is asked about beginnings of one long timeline, the longest first."""

    def __init__(self, model: Any) -> None:
        self._seen: tuple[list[int], torch.Tensor] | None = None
        super().__init__(model)

    def _forward(self, ids: list[int], decoder_ids: list[int] | None = None) -> torch.Tensor:
        if decoder_ids is None and self._seen is not None and self._seen[0][: len(ids)] == ids and self.causal:
            return self._seen[1][: len(ids)]
        logits = super()._forward(ids, decoder_ids)
        if decoder_ids is None and len(ids) > BEYOND:
            self._seen = ids, logits
        return logits


class Crossings(Scenario):
    """A check for every threshold of the model that its context reaches past."""

    oracle = Remembering
    context = 1 << 15

    def _named(self) -> dict[str, Callable[[], str]]:
        return {f"across {at}": partial(self.cross, at) for at in thresholds(self._loaded.model.config)}

    def cross(self, threshold: int) -> str:
        """Go past a threshold, with another text where a text has two right answers."""
        for _ in range(_TEXTS):
            try:
                return self._cross(threshold)
            except TwoAnswers:
                continue
        raise Mismatch(f"each of {_TEXTS} texts has two right answers")

    def _compare(self, reply: Reply) -> None:
        """See ``Scenario``. Raises ``TwoAnswers`` where rounding moves the model's own logits as far."""
        try:
            super()._compare(reply)
        except Mismatch:
            if self._encodes or self._oracle.moved_by_rounding(reply.prompt, reply.tokens) < self._tolerance:
                raise
            self._errors.pop()
            raise TwoAnswers from None

    def _cross(self, threshold: int) -> str:
        """Decode across it; resume, then resume in another engine, until far past it; then all as one prompt."""
        if not self._loaded.verdict.mode.caches:
            self._oracle.causal = False  # past it: every token is compared with a forward of what is before it
        if self._encodes:
            self._compare(self._among(self._driver(), self._text(threshold + BEYOND), _LAST, None))
            return ""
        with tempfile.TemporaryDirectory(dir=FAST_FOLDER) as folder:
            replies = self._grown(threshold, folder)
        replies.append(self._among(self._driver(), replies[-1].prompt, _LAST, None))
        for reply in sorted(replies, key=lambda one: -len(one.prompt)):
            self._compare(reply)
        return ""

    def _grown(self, threshold: int, folder: str) -> list[Reply]:
        driver = self._driver(folder=folder)
        replies = [self._among(driver, self._text(threshold - _BEFORE), _CROSSING, "long")]
        replies.append(self._among(driver, self._on(replies[-1]), _LAST, "long"))
        driver.leave()
        replies.append(self._among(self._driver(folder=folder), self._on(replies[-1]), _LAST, "long"))
        return replies

    def _on(self, reply: Reply) -> list[int]:
        """What the session is asked next."""
        return [*reply.prompt, *reply.tokens, *self._text(BEYOND // 2)]

    def _among(self, driver: Driver, prompt: list[int], count: int, session: str | None) -> Reply:
        """The reply to ``prompt``, another session decoding in every step before it, and one that begins after it."""
        before = driver.send(self._text(_OTHER), len(prompt) // _STEP + count + 8)
        driver.step(2)
        turn = driver.send(prompt, count, session)
        driver.step(2)
        after = driver.send(self._text(_OTHER), _LAST)
        driver.run()
        for other in (before, after):
            self._compare(driver.reply(other))
        return driver.reply(turn)

    def _driver(self, step_tokens: int = _STEP, folder: str | None = None) -> Driver:
        driver = Driver(self._loaded, self._banned, kv_memory=_KV, step_tokens=step_tokens, folder=folder)
        self.mode = driver.facts.mode
        return driver
