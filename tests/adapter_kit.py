"""Adapters in peft's format with random weights, and models with their weights merged: the oracle."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from engine_kit import Kit
from safetensors.torch import save_file
from tiny_models import greedy

from scheduler.turn_receipt import Miss

ATTENTION = ("q_proj", "v_proj")
ALL = (*ATTENTION, "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Parts = dict[str, tuple[torch.Tensor, torch.Tensor]]  # A and B by the name of a module


def linear_maps(model: Any, targets: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """The linear maps of a model whose names end with one of ``targets``."""
    for name, module in model.named_modules():
        if name.split(".")[-1] in targets and hasattr(module, "in_features"):
            yield name, module


def make_parts(model: Any, targets: tuple[str, ...], rank: int, seed: int, ranks: Mapping[str, int] = {}) -> Parts:
    """Random halves that change every result much. ``ranks``: of modules with another rank."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, module in linear_maps(model, targets):
        r = ranks.get(name.split(".")[-1], rank)
        down = torch.randn(r, module.in_features, generator=generator) / math.sqrt(module.in_features)
        made[name] = down, torch.randn(module.out_features, r, generator=generator) / math.sqrt(2 * r)
    assert made, f"no module is called {targets}"
    return made


def save_adapter(folder: Path, parts: Parts, rank: int, alpha: float, **settings: Any) -> Path:
    """A folder as peft writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = sorted({name.split(".")[-1] for name in parts})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets, "bias": "none"} | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for name, (down, up) in parts.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = down.contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = up.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def check_turn(
    kit: Kit, model: Any, prompt: list[int], count: int, reused: int, miss: Miss | None = None, **options: Any
) -> list[int]:
    """One turn, which says what ``model`` says and reuses that many tokens; returns the prompt and the reply."""
    outcome = kit.ask(prompt, count, **options)
    assert outcome.tokens == greedy(model, prompt, count, outcome.tokens)
    assert (outcome.receipt.cached, outcome.receipt.miss) == (reused, miss)
    return [*prompt, *outcome.tokens]


def merged(model: Any, parts: Parts, scale: float | Mapping[str, float]) -> Any:
    """A copy of a plain model with ``scale * up @ down`` added to its weights, in float32; ``scale`` may differ by the
    last part of a module's name.
    """
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, (down, up) in parts.items():
            factor = scale if isinstance(scale, int | float) else scale[name.split(".")[-1]]
            module = twin.get_submodule(name)
            module.weight += factor * (up.float() @ down.float())
    return twin
