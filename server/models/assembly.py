"""``Assembly``: the models of a configuration as a registry, with what their contexts share."""

from __future__ import annotations

import json
from functools import partial

from scheduler.cgroups import physical_memory
from scheduler.engine_config import AdapterSource
from scheduler.tokenizer_parts import TokenizerParts
from server.chat.chat_tokenizer import ChatTokenizer
from server.chat.template import Stability, stability
from server.chat.thinking_budget import MESSAGE, ThinkingDefaults
from server.config.model_list import ModelEntry
from server.config.serve_options import ServeConfig
from server.engine.engine import LoadableEngine
from server.log.session_log import SessionLog
from server.models.engine_maker import EngineMaker
from server.models.offered_model import OfferedModel
from server.models.opening import ContextOpener, SharedParts
from server.models.registry import ModelRegistry
from server.models.room import ModelRoom, weight_bytes
from server.telemetry import traces
from server.telemetry.metrics import Metrics

FLUSH_SECONDS = 30.0  # for an engine that is unloaded to write its KV


class Assembly:
    """Makes ``registry``. ``tracer_provider`` is that of the environment, if it asks for one."""

    def __init__(
        self, config: ServeConfig, engines: EngineMaker, log: SessionLog, first_engine: LoadableEngine
    ) -> None:
        """``first_engine`` was made for the first model, and may be prepared. Raises UsageError."""
        self.tracer_provider = traces.provider_of_environment()
        self._engines = engines
        self._openers: list[ContextOpener] = []
        self._shared = SharedParts(
            log,
            lambda: self.registry.by_fingerprint(),
            tracer=traces.tracer(self.tracer_provider),
            line_seconds=config.line_seconds,
            any_model=config.model_names == "any",
        )
        models = [self._model(entry) for entry in engines.entries]
        models[0].engine = first_engine
        memory = None if config.models_memory is None else int(config.models_memory)
        kv_bytes = physical_memory() // 4 // engines.most_with_kv if config.kv_memory is None else int(config.kv_memory)
        self.registry = ModelRegistry(
            models,
            ModelRoom(engines.most, memory, kv_bytes),
            any_model=self._shared.any_model,
            idle_seconds=config.idle_unload,
            flush_seconds=FLUSH_SECONDS,
        )

    def close(self) -> None:
        """Let the threads of all tokenizers end."""
        for opener in self._openers:
            opener.close()

    def _model(self, entry: ModelEntry) -> OfferedModel:
        config, metrics = entry.config, Metrics()
        aliases = frozenset(config.model_alias)
        load = partial(load_tokens, config)
        opener = ContextOpener(config.name, aliases, load, self._shared, metrics, thinking_defaults(config))
        self._openers.append(opener)

        def new_engine() -> LoadableEngine:
            told = partial(setattr, model, "stage")
            return self._engines.make(entry, told, [*model.adapters.values()])

        model = OfferedModel(
            config.name,
            sorted(aliases),
            new_engine,
            opener.open,
            metrics=metrics,
            pinned=entry.pinned,
            weight_bytes=weight_bytes(config.source),
            task=entry.task,
            adapters=[AdapterSource(name, folder) for name, folder in config.adapter.items()],
        )
        return model


def thinking_defaults(config: ServeConfig) -> ThinkingDefaults:
    """The default limit on reasoning, as the flags say."""
    message = MESSAGE if config.thinking_budget_message is None else config.thinking_budget_message
    return ThinkingDefaults(None if config.thinking_budget < 0 else config.thinking_budget, message)


def load_tokens(config: ServeConfig, parts: TokenizerParts | None = None) -> tuple[ChatTokenizer, Stability]:
    """The tokenizer of a configuration and the measured stability of its template. Without ``parts`` it is read by
    transformers. Raises any exception of theirs.
    """
    file, rules = config.response_template, config.prompt_rules
    declared = None if file is None else json.loads(file.expanduser().read_text())
    if parts is None:
        tokens = ChatTokenizer.load(config.source, declared, rules)
    else:
        tokens = ChatTokenizer.of_parts(parts, declared, rules)
    _ = tokens.dialect  # measured here, not by the first request
    return tokens, stability(tokens)
