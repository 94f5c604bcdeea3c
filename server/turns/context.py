"""``ServerContext``: the parts of a server that routes use, and checks of requests against the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property

from opentelemetry.trace import Tracer
from starlette.requests import HTTPConnection

from scheduler.model_facts import ModelFacts
from server.chat.chat_tokenizer import ChatTokenizer
from server.chat.expansions import expand_with
from server.chat.prompts import check_ids
from server.chat.template import UNMEASURED, Stability
from server.chat.thinking_budget import UNLIMITED, ThinkingDefaults
from server.constraints.grammars import GrammarCheck
from server.engine.engine import Engine
from server.errors import ApiError, bad_request, unavailable
from server.log.identity import Session
from server.log.session_log import SessionLog
from server.log.timeline import SessionRecord
from server.schemas.adaptations import adapt
from server.schemas.requests import GenerationRequest, TurnRequest
from server.telemetry import traces
from server.telemetry.metrics import Metrics
from server.turns.expanding import expander_of
from server.turns.running_turns import RunningTurns
from server.turns.side_call_counts import SideCalls

LINE_SECONDS = 86_400  # that a line is kept after its last turn
STOPPING_RETRY = 5  # seconds, told to a client that comes while the server stops


@dataclass(frozen=True)
class ServerContext:
    """The parts of one server. ``template`` is the measured stability of its chat template. ``created`` is the time of
    its start in Unix seconds, shown as the model's creation time. ``line_seconds``: how long a line is kept after its
    last turn; 0: there are no lines. ``thinking``: the default limit on reasoning. ``aliases``: other names of the
    model; ``any_model``: whether requests may call it by any name. ``adapter``: with which the model runs turns;
    "": with none. ``by_fingerprint``: the contexts of all models that were loaded so far, by the fingerprints of their
    tokenizers.
    """

    engine: Engine
    log: SessionLog
    tokens: ChatTokenizer
    served_name: str
    template: Stability = UNMEASURED
    thinking: ThinkingDefaults = UNLIMITED
    metrics: Metrics = field(default_factory=Metrics)
    tracer: Tracer = field(default_factory=traces.tracer)
    created: int = field(default_factory=lambda: int(time.time()))
    line_seconds: int = LINE_SECONDS
    side_calls: SideCalls = field(default_factory=SideCalls)
    running: RunningTurns = field(default_factory=RunningTurns)
    aliases: frozenset[str] = frozenset()
    adapter: str = ""
    any_model: bool = True
    by_fingerprint: Callable[[], Mapping[str, ServerContext]] = dict

    @cached_property
    def names(self) -> list[str]:
        """The names of the model: its own, then its aliases."""
        return [self.served_name, *sorted(self.aliases)]

    @cached_property
    def grammars(self) -> GrammarCheck:
        """Checks whether grammars of requests compile."""
        return GrammarCheck(self.tokens.named_tokens)

    @property
    def facts(self) -> ModelFacts:
        """What the engine measured of the model. Raises a 503 while there is no engine."""
        if self.engine.facts is None:
            raise unavailable(f"The engine is {self.engine.state()}: no model is ready yet.", 2)
        return self.engine.facts

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the tokenizer with the model's vocabulary. Raises a 503 while there is no engine."""
        return self.tokens.fingerprint(self.facts.vocab_size)

    def tokens_of(self, fingerprint: str) -> ChatTokenizer:
        """The tokenizer of this fingerprint, if a model that was loaded has it, else the own one."""
        context = self.by_fingerprint().get(fingerprint)
        return self.tokens if context is None else context.tokens

    def check_model(self, name: str) -> None:
        """Raises a 404 unless the served model may be called by ``name``; "" is no name."""
        if name and name not in self.names:
            if not self.any_model:
                raise model_not_found("model", self.served_name)
            adapt("model_aliased", "model")

    def check(self, body: TurnRequest, session: Session | None) -> ModelFacts:
        """Check everything about a request that does not need its prompt. Raises a 503 while no turn can be
        submitted.
        """
        self.check_model(body.model)
        if self.engine.state() == "stopping":
            raise unavailable("The server is shutting down.", STOPPING_RETRY)
        if session is not None and body.choices > 1:
            message = "A session has one timeline: a request that names one asks for one choice."
            raise bad_request(message, "n" if isinstance(body, GenerationRequest) and body.n > 1 else body.PROMPT)
        if session is not None and body.salt:
            param = "cache_prompt: false" if body.cache_salt is None else "cache_salt"
            message = f"{param} is for requests that keep nothing: what a session or a stored response has is reused."
            raise bad_request(message, param.partition(":")[0], "invalid_value")
        facts = self.facts
        check_ids(list(body.logit_bias), facts.vocab_size, "logit_bias")
        check_ids(body.stop_token_ids, facts.vocab_size, "stop_token_ids")
        return facts

    async def open(self, session: Session | None, held: ExitStack) -> SessionRecord | None:
        """Hold a named session until ``held`` is closed. Returns its record, None if it is new. Raises LogFull while
        the log cannot be written, and QuotaReached: a turn that cannot be committed is not computed.
        """
        if session is None:
            return None
        await self.log.writable()
        await self.log.hold(session.tenant, session.name, held)
        record = await self.log.get(session.tenant, session.name)
        await self.log.holdings.check(session.tenant, begins=record is None)
        return record


def context_of(request: HTTPConnection) -> ServerContext:
    """The ServerContext of the request's model; of requests that name none, that of the first model with the engines of
    all. Prompts that are built for this request from here on find their pictures by it.
    """
    chosen: ServerContext | None = request.scope.get("state", {}).get("context")
    context: ServerContext = request.app.state.models.context() if chosen is None else chosen
    expand_with(expander_of(request, context.engine, context.log))
    return context


def model_not_found(param: str | None, served: str) -> ApiError:
    """404: the request names another model."""
    message = f"This server does not serve that model, but {served}: see /v1/models."
    return ApiError(404, message, param=param, code="model_not_found")


def headers_of(session: Session | None) -> dict[str, str]:
    return {} if session is None else {"x-session-id": session.name}
