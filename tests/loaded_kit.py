"""Models as an engine loads them; their greedy tokens, through the engine, and those of a plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import greedy

from scheduler.engine_assembly import build_engine
from scheduler.engine_config import EngineConfig
from scheduler.model.loader import LoadedModel, LoadFailed, load
from scheduler.protocol import Submit, pack_ids
from scheduler.sampling_params import Sampling, Stopping


def load_quietly(path: Path | str, **options: Any) -> LoadedModel:
    """Load on the CPU."""
    return load(EngineConfig("", str(path), device="cpu", **options), lambda message: None)


def reason(path: Path | str, **options: Any) -> str:
    """Why it cannot be loaded: one line that names it."""
    with pytest.raises(LoadFailed) as caught:
        load_quietly(path, **options)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def generate(loaded: LoadedModel, prompts: list[list[int]], count: int) -> list[list[int]]:
    """``count`` greedy tokens a prompt, side by side."""
    engine, _ = build_engine(EngineConfig("", "", device="cpu", kv_memory=8 << 20), loaded)
    for number, prompt in enumerate(prompts):
        stopping = Stopping(max_tokens=count, ignore_eos=True)
        engine.submit(Submit(str(number), "a", pack_ids(prompt), None, Sampling(temperature=0.0), stopping))
    said: list[list[int]] = [[] for _ in prompts]
    with torch.no_grad():
        while not engine.idle:
            for delta in engine.step().deltas:
                said[int(delta.turn)] += delta.tokens
    engine.check_integrity()
    return said


def check_generated(loaded: LoadedModel, prompts: list[list[int]], count: int, model: Any) -> None:
    """``loaded`` must generate what ``model`` says, each prompt alone and without a cache."""
    said = generate(loaded, prompts, count)
    assert said == [greedy(model, prompt, count, tokens) for prompt, tokens in zip(prompts, said, strict=True)]
