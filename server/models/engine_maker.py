"""``EngineMaker``: makes the engines of a server's models, each with its part of the machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from scheduler.engine_config import AdapterSource
from scheduler.model_facts import ModelFacts
from server.config.engine_options import engine_config
from server.config.model_list import ModelEntry, model_list, most_models
from server.config.serve_options import ServeConfig
from server.engine.engine_process import EngineProcess
from server.engine.launcher import EngineLauncher
from server.hub import is_offline
from server.models.kv_records import KvRecords
from server.telemetry.log_context import say


class EngineMaker:
    """The models of a configuration, and engines for them. Imports nothing that takes long: the first engine's process
    is started before the server has imported its own modules.
    """

    def __init__(
        self,
        config: ServeConfig,
        launcher: EngineLauncher,
        folder: Path,
        on_ready: Callable[[], None],
        on_forgotten: Callable[[str, str, int], None],
    ) -> None:
        """``folder`` is the data dir. ``on_ready`` is called for each engine that becomes ready, ``on_forgotten`` with
        tenant, session and life of a session that no model has KV of any more. Raises UsageError.
        """
        self.entries = model_list(config)
        self.most = most_models(config, len(self.entries))
        with_kv = max(1, sum(entry.keeps_kv for entry in self.entries))
        self.most_with_kv = min(self.most, with_kv)  # models among which the memory for KV is divided
        self._with_kv = with_kv
        self._launcher = launcher
        self._on_ready = on_ready
        names = [entry.config.name for entry in self.entries]
        self._records = KvRecords(folder, names, on_forgotten, remote=config.copies_kv)

    def make(
        self,
        entry: ModelEntry,
        on_stage: Callable[[str], None] = lambda stage: None,
        adapters: Sequence[AdapterSource] | None = None,
    ) -> EngineProcess:
        """An engine that is not started. ``on_stage`` is told each stage of its loads. ``adapters``: that are loaded
        with the model; None: those of its configuration. Raises UsageError.
        """
        name = entry.config.name
        config = engine_config(entry.config, 1 / self.most_with_kv, self._with_kv)
        if adapters is not None:
            config = msgspec.structs.replace(config, adapters=tuple(adapters))
        records = self._records

        def on_loading(stage: str) -> None:
            on_stage(stage)
            say(stage if len(self.entries) == 1 else f"{name}: {stage}")

        def ready(facts: ModelFacts) -> None:
            if facts.pooling is None:
                records.record_loaded(name, facts.fingerprint)
            if len(self.entries) > self.most:
                self._launcher.start_early()  # for the next model
            self._on_ready()

        return EngineProcess(
            msgspec.structs.replace(config, offline=is_offline(), kv_kept=tuple(records.others(name))),
            self._launcher,
            on_loading=on_loading,
            on_ready=ready,
            on_forgotten=lambda *of: records.forgotten(name, *of),
        )
