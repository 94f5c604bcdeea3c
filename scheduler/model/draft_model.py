"""Loads the draft model (``--draft-model``): a small model that proposes tokens for the served one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from scheduler.accel.cpu import ways
from scheduler.accel.cpu.activations import round_activations
from scheduler.engine_config import EngineConfig
from scheduler.model.loader import LoadedModel, LoadFailed, load
from scheduler.protocol import Loading

_SAMPLE = 'def café(x: int) -> "日本":\n    return x + 12345  # Привет, мир! 🙂\n'
_FOLDER = "draft"  # in the folder of stored KV


def load_draft_model(config: EngineConfig, served: LoadedModel, tell: Any) -> LoadedModel:
    """The draft model of ``config`` for the model that is ``served``; ``tell`` gets ``Loading`` messages. Raises
    ``LoadFailed`` where it cannot draft for it.
    """
    assert config.draft_model is not None
    tell(Loading("loading the draft model"))
    threads = torch.get_num_threads()
    settings = {"model": config.draft_model, "generation_config": "openai", "weights": "auto", "activations": "auto"}
    try:
        with ways.kept():
            draft = load(msgspec.structs.replace(config, tensor_parallel=1, **settings), lambda _: None)
    finally:
        round_activations(served.activations)  # for both; it was measured without
    draft = replace(draft, activations=served.activations)
    torch.set_num_threads(threads)  # as many as the served model has work for
    if obstacle := _obstacle(draft, served):
        raise LoadFailed(f"--draft-model {config.draft_model!r}: {obstacle}")
    return draft


def divide_memory(config: EngineConfig, total: int, served: LoadedModel, draft: LoadedModel) -> list[EngineConfig]:
    """The configurations of the two models' KV: both hold equally many tokens in ``total`` bytes. The draft model's is
    in a folder of its own, and in no remote tier.
    """
    bytes_each = [max(1, one.verdict.token_bytes) for one in (served, draft)]
    share = bytes_each[1] / sum(bytes_each)
    folder = None if config.kv_folder is None else str(Path(config.kv_folder) / _FOLDER)
    parts = {}
    for name in ("host_memory", "disk_space"):
        whole = getattr(config, name)
        parts[name] = (None, None) if whole is None else (whole - int(whole * share), int(whole * share))
    ours = {name: mine for name, (mine, _) in parts.items()}
    theirs = {name: small for name, (_, small) in parts.items()}
    return [
        msgspec.structs.replace(config, kv_memory=total - int(total * share), **ours),
        msgspec.structs.replace(config, kv_memory=int(total * share), kv_folder=folder, remote=None, **theirs),
    ]


def _obstacle(draft: LoadedModel, served: LoadedModel) -> str | None:
    """Why ``draft`` cannot draft for ``served``."""
    if served.start or draft.start:
        return "an encoder-decoder model neither drafts nor is drafted for"
    if not draft.verdict.mode.caches:
        return "no mode that keeps KV gives correct results for it"
    ours, theirs = served.tokenizer, draft.tokenizer
    same = ours.get_vocab() == theirs.get_vocab() and ours.encode(_SAMPLE) == theirs.encode(_SAMPLE)
    if not same:
        return "its tokenizer is not that of the served model"
    return None
