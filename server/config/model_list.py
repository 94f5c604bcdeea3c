"""The models of `warmturn serve`: those of the command line, and those of a folder or a TOML file, with options."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scheduler.model_task import Task, task_of_files
from server.config.command_line import configure
from server.config.serve_options import ServeConfig
from server.config.usage_error import UsageError

OWN = frozenset(  # options that each model may have for itself
    {
        "model",
        "model_alias",
        "adapter",
        "device",
        "dtype",
        "weights",
        "activations",
        "tensor_parallel",
        "speculate",
        "draft_model",
        "max_context",
        "response_template",
        "prompt_rules",
        "generation_config",
        "thinking_budget",
        "thinking_budget_message",
        "kv_memory",
        "host_memory",
        "kv_dtype",
        "kv_at_rest",
        "max_running",
        "max_step_tokens",
        "max_queued",
    }
)
MOST = 4  # models that are loaded at once, unless told otherwise
SUFFIX = ".gguf"


@dataclass(frozen=True)
class ModelEntry:
    """One model: the server's options with its own in their place. ``pinned``: it is loaded at the start, and stays.
    ``task``: what it is for, as its files say; None where that is not known yet.
    """

    config: ServeConfig
    pinned: bool = False
    task: Task | None = None

    @property
    def keeps_kv(self) -> bool:
        """Whether its sessions have KV, as far as is known."""
        return self.task in ("generate", None)


def model_list(config: ServeConfig) -> list[ModelEntry]:
    """All models that a server offers. Those that generate come first, and the first one is meant by requests that
    name none. A model that is alone and is never idle is pinned. Raises UsageError.
    """
    listed = [] if config.models is None else read_models(config, config.models.expanduser())
    named = "model" in config.model_fields_set or config.models is None
    if config.adapter and not named:
        raise UsageError("--adapter: it is for MODEL; in a file for --models each model may have an adapter table")
    entries = [ModelEntry(config)] if named else []
    entries += [entry_of(config, {"model": model}, None, "--also") for model in config.also]
    entries += listed
    if len(entries) == 1:
        return [ModelEntry(entries[0].config, entries[0].pinned or not config.idle_unload)]
    names = [name for each in entries for name in (*{each.config.name, *each.config.model_alias}, *each.config.adapter)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"two models have the name {twice}: give one another in a file for --models")
    known = [replace(entry, task=task_of_files(entry.config.source)) for entry in entries]
    return sorted(known, key=lambda entry: not entry.keeps_kv)


def read_models(config: ServeConfig, path: Path) -> list[ModelEntry]:
    """The models of a folder, by their names, or of a TOML file, in its order. Raises UsageError."""
    if path.is_dir():
        found = sorted(entry for entry in path.iterdir() if is_model(entry))
        if not found:
            raise UsageError("--models: there is no model in this folder: no folder with a config.json, no .gguf file")
        return [entry_of(config, {"model": str(entry)}, entry.name.removesuffix(SUFFIX), "--models") for entry in found]
    try:
        tables = tomllib.loads(path.read_text("utf-8")).get("models")
    except OSError as error:
        raise UsageError(f"--models: the file cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--models: the file is no TOML: {error}") from None
    if not isinstance(tables, dict) or not tables or not all(isinstance(table, dict) for table in tables.values()):
        raise UsageError("--models: the file has no tables [models.NAME]")
    return [table_entry(config, name, table, path.parent) for name, table in tables.items()]


def table_entry(config: ServeConfig, name: str, table: dict[str, Any], folder: Path) -> ModelEntry:
    """A model of a TOML file, whose ``model`` is a hub id or a path from the file's ``folder``. Raises UsageError."""
    options = {key.replace("-", "_"): value for key, value in table.items()}
    pinned = options.pop("pinned", False)
    options["model_alias"] = options.pop("alias", options.pop("model_alias", []))
    where = f"--models: {name}"
    if not isinstance(pinned, bool):
        raise UsageError(f"{where}: pinned: expected true or false")
    if unknown := next((key for key in options if key not in OWN), None):
        raise UsageError(f"{where}: {unknown} is no option of a model")
    source = options.get("model")
    if not isinstance(source, str):
        raise UsageError(f"{where}: model is needed: a hub id or a path")
    if (folder / source).exists():
        options["model"] = str((folder / source).absolute())
    if isinstance(adapters := options.get("adapter"), dict):  # paths from the folder of the file, too
        options["adapter"] = {name: str(folder / path) for name, path in adapters.items() if isinstance(path, str)}
    return ModelEntry(entry_of(config, options, name, where).config, pinned)


def entry_of(config: ServeConfig, own: dict[str, Any], name: str | None, where: str) -> ModelEntry:
    """A model with options of its ``own``; the others are the server's, but names. Raises UsageError."""
    given = {field: getattr(config, field) for field in config.model_fields_set if field in type(config).model_fields}
    given |= {"served_model_name": name, "model_alias": [], "adapter": {}, "also": [], "models": None}
    try:
        return ModelEntry(configure(type(config), given | own))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def is_model(path: Path) -> bool:
    """Whether a path in a folder of models is one."""
    return (path / "config.json").is_file() or (path.is_file() and path.suffix == SUFFIX)


def most_models(config: ServeConfig, count: int) -> int:
    """How many of ``count`` models may be loaded at once."""
    return min(count, MOST) if config.max_models is None else config.max_models
