"""``ContextOpener``: makes the context of a model each time that it is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from opentelemetry.trace import Tracer

from scheduler.tokenizer_parts import TokenizerParts
from server.chat.chat_tokenizer import ChatTokenizer
from server.chat.template import Stability
from server.chat.thinking_budget import UNLIMITED, ThinkingDefaults
from server.config.usage_error import UsageError
from server.daemon_thread import in_daemon_thread
from server.engine.engine import LoadableEngine
from server.log.session_log import SessionLog
from server.telemetry import traces
from server.telemetry.metrics import Metrics
from server.turns.context import LINE_SECONDS, ServerContext
from server.turns.running_turns import RunningTurns
from server.turns.side_call_counts import SideCalls

LoadTokens = Callable[[TokenizerParts | None], tuple[ChatTokenizer, Stability]]


@dataclass(frozen=True)
class SharedParts:
    """What the contexts of all models have in common; see ``ServerContext``."""

    log: SessionLog
    by_fingerprint: Callable[[], Mapping[str, ServerContext]]
    tracer: Tracer = field(default_factory=traces.tracer)
    created: int = field(default_factory=lambda: int(time.time()))
    line_seconds: int = LINE_SECONDS
    side_calls: SideCalls = field(default_factory=SideCalls)
    running: RunningTurns = field(default_factory=RunningTurns)
    any_model: bool = True


class ContextOpener:
    """The contexts of one model. Its tokenizer is read at the first load, and again when it has changed."""

    def __init__(
        self,
        name: str,
        aliases: frozenset[str],
        load_tokens: LoadTokens,
        shared: SharedParts,
        metrics: Metrics,
        thinking: ThinkingDefaults = UNLIMITED,
    ) -> None:
        """``load_tokens`` makes a tokenizer from what the engine has read (None: from the files); it may block."""
        self._name = name
        self._aliases = aliases
        self._load_tokens = load_tokens
        self._shared = shared
        self._metrics = metrics
        self._thinking = thinking
        self._parts: TokenizerParts | None = None
        self._tokens: tuple[ChatTokenizer, Stability] | None = None

    async def open(self, engine: LoadableEngine) -> ServerContext:
        """The context of an engine that loads. Raises UsageError for a tokenizer that cannot be loaded."""
        tokens, template = await self._current(await engine.tokenizer())
        shared = self._shared
        return ServerContext(
            engine,
            shared.log,
            tokens,
            self._name,
            template,
            self._thinking,
            metrics=self._metrics,
            tracer=shared.tracer,
            created=shared.created,
            line_seconds=shared.line_seconds,
            side_calls=shared.side_calls,
            running=shared.running,
            aliases=self._aliases,
            any_model=shared.any_model,
            by_fingerprint=shared.by_fingerprint,
        )

    def close(self) -> None:
        """Let the tokenizer's threads end."""
        if self._tokens is not None:
            self._tokens[0].close()

    async def _current(self, parts: TokenizerParts | None) -> tuple[ChatTokenizer, Stability]:
        if self._tokens is not None and parts is not None and parts == self._parts:
            return self._tokens
        try:
            made = await in_daemon_thread(lambda: self._load_tokens(parts), "tokenizer")
        except Exception as error:
            raise UsageError(f"the tokenizer cannot be loaded: {first_line(error)}") from error
        self.close()
        self._parts, self._tokens = parts, made
        return made


def first_line(error: Exception) -> str:
    """The first line of an exception's message."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
