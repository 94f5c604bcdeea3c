"""``ModelLoading``: how far an engine is with loading its model, for those who wait for it."""

from __future__ import annotations

import asyncio
import math
import time

from scheduler.model_facts import ModelFacts
from scheduler.tokenizer_parts import TokenizerParts
from server.engine.engine import EngineFailed


class ModelLoading:
    """The loads of one engine, one after the other. The first one's tokenizer and facts can be awaited.

    Invariant: neither changes once it is known; that there will be none is known too.
    """

    def __init__(self) -> None:
        self._allowed = asyncio.Event()
        self._tokenizer_known = asyncio.Event()
        self._tokenizer: TokenizerParts | None = None
        self._over = asyncio.Event()  # the first load
        self._facts: ModelFacts | None = None  # of the first load
        self._started = time.monotonic()
        self._seconds = 1.0  # of the last load that succeeded
        self.failure: str | None = None  # why the model cannot be served, in the engine's own words

    @property
    def is_over(self) -> bool:
        """Whether the first load has ended, whatever came of it."""
        return self._over.is_set()

    @property
    def seconds(self) -> float:
        """Of the last load that succeeded; a guess before."""
        return self._seconds

    @property
    def retry_after(self) -> int:
        """Whole seconds after which a client may try again."""
        return max(1, math.ceil(self._seconds))

    def allow(self) -> None:
        self._allowed.set()

    async def wait_allowed(self) -> None:
        await self._allowed.wait()

    def begin(self) -> None:
        self.failure = None
        self._started = time.monotonic()

    def set_tokenizer(self, parts: TokenizerParts | None) -> None:
        """The engine has read the tokenizer; None: it hands over none."""
        if not self._tokenizer_known.is_set():
            self._tokenizer = parts
            self._tokenizer_known.set()

    def complete(self, facts: ModelFacts) -> None:
        """The model is loaded."""
        self._seconds = time.monotonic() - self._started
        if not self.is_over:
            self._facts = facts
            self.end()

    def end(self) -> None:
        """No engine will come any more, or the first one is ready."""
        self.set_tokenizer(None)
        self._over.set()

    async def facts(self) -> ModelFacts:
        """The facts of the first load. Raises EngineFailed when the model cannot be served."""
        await self._over.wait()
        if self._facts is None:
            raise EngineFailed(self.failure or "stopped before the model was loaded")
        return self._facts

    async def tokenizer(self) -> TokenizerParts | None:
        """The tokenizer of the first load, as soon as the engine has read it; None if it hands over none, or failed."""
        await self._tokenizer_known.wait()
        return self._tokenizer
